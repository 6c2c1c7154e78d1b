"""Find gradients that no engine reduces, because its calls bypass it, or that one reduces in every chunk.

DDP reduces gradients only in the backward pass that follows its own forward pass. After `ddp.module.image(x)`, which
bypasses it, each rank keeps its local gradients, although the loss is right. FSDP has whole parameters only during its
own forward and backward pass: an encoder inside a larger module that is one FSDP unit finds shards in its second pass.

A parameter does not refer to the engine that holds it, and torch keeps no list of engines. The garbage collector finds
the instances of DDP and FSDP, once, in the first step, and only if a parameter is in none of the engines that were
called: it goes through all objects of the process. Without a process group there are no engines. Other engines may
reduce in a call after the step; for these `same_parameters` compares later.

An engine that reduces while it is held averages `.grad`, or removes it (as DeepSpeed's ZeRO does). Then only the last
chunk counts on all ranks, although the loss is right and no rank differs from another. Either the `hold` of a
registered SyncControl does not hold, or the model has an engine that is not known. So the first such pass is watched,
at the smallest parameters.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..._base import frozen, not_reduced
from ..._base.modules import modules_in, parameters_in
from .ddp import parameters_of_ddp
from .fsdp import fsdp_classes, whole_parameters_of_fsdp
from .known import Synchronized, is_registered


def check_not_passed_by(
    name: str,  # of the model
    reached: Sequence[Tensor],  # the leaves of its graph
    called: Iterable[nn.Module],  # the modules whose calls were observed
    engines: Collection[Synchronized],  # those of them that an engine synchronizes, with all that they hold
    live: Callable[[], Iterable[nn.Module]],  # returns all engines; not called if `engines` hold all that was reached
    unchecked: Iterable[Tensor] = (),  # parameters for which the caller is responsible
) -> None:
    """Raise ValueError if DDP of several ranks, or FSDP, holds a parameter that a model trains, and was not called.

    Parameters of modules that were not observed (compiled code calls these, or a function uses the parameter itself)
    are not checked.
    """
    inside_engines = {id(inner): inner for engine in engines for inner in modules_in(engine.module)}
    outside = {id(p) for p in reached} - {id(p) for p in parameters_in(*(engine.module for engine in engines))}
    if outside:
        sharding = [inner for inner in inside_engines.values() if _is_fsdp(inner)]
        outside -= {id(p) for inner in sharding for p in whole_parameters_of_fsdp(inner)}
    if not outside:
        return
    instances = live()
    _check_not_sharded_outside(name, outside, inside_engines, instances)
    inside = {id(p) for module in called for p in module.parameters(recurse=False)}
    left = (outside & inside) - {id(p) for p in unchecked}
    if not left:
        return
    for ddp in instances:
        if not isinstance(ddp, DistributedDataParallel) or ddp.process_group.size() == 1:
            continue
        for path, p in parameters_of_ddp(ddp):
            if id(p) in left:
                raise ValueError(
                    f"{name} must reach its parameters through the DistributedDataParallel that holds them, which "
                    f"reduces gradients only after its own forward pass, and reaches {path!r} without it: "
                    f"{not_reduced.TITLE}. {not_reduced.FIX}. Give GradCache the wrapped model, or functions that "
                    "call it (in a Hugging Face Trainer the model that compute_loss gets; in Lightning "
                    "self.trainer.strategy.model, or deferred=True); parameters that you reduce yourself go into "
                    "unchecked="
                )


def _is_fsdp(module: nn.Module) -> bool:
    return isinstance(module, fsdp_classes())


def _check_not_sharded_outside(name: str, reached: set[int], called: Container[int], live: Iterable[nn.Module]) -> None:
    """Raise ValueError if a parameter that a graph has reached is one of FSDP's whole ones, and FSDP was not called."""
    for module in live:
        if id(module) in called or not _is_fsdp(module):
            continue
        if any(id(p) in reached for p in whole_parameters_of_fsdp(module)):
            raise ValueError(
                f"{name} must reach its parameters through the FSDP module that shards them, and was called inside of "
                f"a larger one, {type(module).__name__}, which has them whole only during its own forward pass: shard "
                "the encoder by itself too (fully_shard(encoder) before fully_shard(model)), or call the larger module "
                "(in Lightning: self.trainer.strategy.model)"
            )


_found = WeakSet[nn.Module]()  # engines, by earlier searches


def live_engines() -> list[nn.Module]:
    """Return all instances of DistributedDataParallel, FSDP1 and FSDP2 in this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    classes: tuple[type[Any], ...] = (DistributedDataParallel, *fsdp_classes())
    kinds = [kind for cls in classes for kind in _all_subclasses(cls)]
    referrers = gc.get_referrers(*kinds)
    # The collector does not search frozen objects. What refers to a class and is older than engines outside `_found` is
    # searched only if these are: an object of the last search, or before the first one the class's module.
    older = frozen.oldest or vars(sys.modules[DistributedDataParallel.__module__])
    if not any(referrer is older for referrer in referrers):
        gc.collect()  # before they are unfrozen, or it would go through them; the garbage of others would be frozen
        gc.unfreeze()
        referrers = gc.get_referrers(*kinds)
        frozen.freeze(DistributedDataParallel)
    engines = dict.fromkeys(x for x in (*_found, *referrers) if issubclass(type(x), classes))
    _found.update(engines)
    return [*engines]


def _all_subclasses(kind: type) -> list[type]:
    classes = [kind]
    for cls in classes:  # which grows
        classes += cls.__subclasses__()
    return classes


HOW_TO_REGISTER = """Register its switch:

    wb.gradcache.register_sync_control(
        wb.gradcache.SyncControl(
            matches=lambda module: isinstance(module, TheEngine),
            hold=lambda module: module.no_sync(),  # a context in which gradients stay in .grad
        )
    )"""
_FEW = 3  # parameters of an engine that are watched


@contextmanager
def watched(engines: Iterable[Synchronized], free_parameters: Iterable[Tensor] = ()) -> Iterator[list[ValueError]]:
    """Watch a backward pass in which these engines are held, and parameters of none; afterward the list has the errors.

    Of the engines, those are watched whose control a caller has registered.
    """
    arrived: dict[int, Tensor] = {}
    watching, hooks, mistakes = [], [], list[ValueError]()
    registered = [e for e in engines if is_registered(e.control) and e.control.remember is None]
    for engine, parameters in [(None, free_parameters), *((e, e.module.parameters()) for e in registered)]:
        trained = [p for p in parameters if p.requires_grad and p.layout is torch.strided]
        for p in sorted(trained, key=torch.numel)[:_FEW]:
            watching.append((engine, p, None if p.grad is None else _dense(p.grad).clone()))
            hooks.append(p.register_hook(partial(_keep, arrived, id(p))))
    try:
        yield mistakes
    finally:
        for hook in hooks:
            hook.remove()
    for engine, p, before in watching:
        if id(p) not in arrived:
            continue
        expected = arrived[id(p)] if before is None else before + arrived[id(p)]
        if p.grad is None:
            mistakes.append(_mistake(engine, "took the gradient out of .grad", p))
        elif p.grad.shape != expected.shape or not torch.allclose(_dense(p.grad), expected, rtol=1e-2, equal_nan=True):
            mistakes.append(_mistake(engine, "changed the gradient", p))


def _keep(arrived: dict[int, Tensor], key: int, grad: Tensor | None) -> None:
    if grad is not None:  # a node may return none
        arrived[key] = _dense(grad).clone()


def _dense(grad: Tensor) -> Tensor:
    """Return the gradient, which an embedding may have made sparse, as a dense tensor."""
    grad = grad.detach()
    return grad if grad.layout is torch.strided else grad.to_dense()


def _mistake(engine: Synchronized | None, change: str, p: Tensor) -> ValueError:
    if engine is None:
        return ValueError(
            f"gradients must stay in .grad until all chunks have added theirs, and something {change} of a parameter "
            f"of shape {tuple(p.shape)} in a chunk's pass: an engine that gradient caching does not know? "
            f"{HOW_TO_REGISTER}"
        )
    return ValueError(
        f"the engine of {type(engine.module).__name__} must leave gradients in .grad while the `hold` of its "
        f"registered SyncControl is entered, and {change} of a parameter of shape {tuple(p.shape)}: it reduces in "
        "every chunk's backward pass. Give a `hold` that keeps it from that; where the engine keeps gradients to "
        "itself until it synchronizes, give `remember` too"
    )
