"""Find parameters that belong to an engine which a step does not call.

DDP reduces gradients only in the backward pass that follows its own forward pass. After `ddp.module.image(x)`, which
bypasses it, each rank keeps its local gradients, although the loss is right. FSDP has whole parameters only during its
own forward and backward pass: an encoder inside a larger module that is one FSDP unit finds shards in its second pass.

A parameter does not refer to the engine that holds it, and torch keeps no list of engines. The garbage collector finds
the instances of DDP and FSDP, once, in the first step, and only if a parameter is in none of the engines that were
called: it goes through all objects of the process. Without a process group there are no engines. Other engines may
reduce in a call after the step; for these `replicas` compares parameters later.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..._base import not_reduced
from ..._base.modules import modules_in, parameters_in
from .ddp import parameters_of_ddp
from .fsdp import fsdp_classes, whole_parameters_of_fsdp
from .known import Synchronized


def check_not_passed_by(
    name: str,
    reached: Sequence[Tensor],
    called: Iterable[nn.Module],
    engines: Collection[Synchronized],
    live: Callable[[], Iterable[nn.Module]],
    unchecked: Iterable[Tensor] = (),
) -> None:
    """Check that a model has called the engines that hold the parameters which it trains.

    Args:
        name: of the model, for the message.
        reached: the leaves of its graph.
        called: the modules whose calls were observed. Parameters of other modules (compiled code calls these, or a
            function uses the parameter itself) are not checked.
        engines: those of them that an engine synchronizes, with all that they hold.
        live: returns all engines of this process (`live_engines`); not called if `engines` hold all that was reached.
        unchecked: parameters for which the caller is responsible.

    Raises:
        ValueError: if a DistributedDataParallel of several ranks, or FSDP, holds a parameter and was not called.
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


def live_engines() -> list[nn.Module]:
    """Return all instances of DistributedDataParallel, FSDP1 and FSDP2 in this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    classes: tuple[type[Any], ...] = (DistributedDataParallel, *fsdp_classes())
    kinds = [kind for cls in classes for kind in _all_subclasses(cls)]
    referrers = gc.get_referrers(*kinds)
    # The collector does not search frozen objects. The module of a class is older than its instances and refers to the
    # class: if that was searched, so were they.
    module = vars(sys.modules[DistributedDataParallel.__module__])
    if not any(referrer is module for referrer in referrers):
        gc.collect()  # before they are unfrozen, or it would go through them; the garbage of others would be frozen
        gc.unfreeze()
        referrers = gc.get_referrers(*kinds)
        gc.freeze()
    return [x for x in referrers if issubclass(type(x), classes)]


def _all_subclasses(kind: type) -> list[type]:
    classes = [kind]
    for cls in classes:  # which grows
        classes += cls.__subclasses__()
    return classes
