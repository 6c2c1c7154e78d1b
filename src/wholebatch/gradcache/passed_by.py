"""Find parameters that belong to a DistributedDataParallel which a step does not call.

DDP reduces gradients only in the backward pass that follows its own forward pass. After `ddp.module.image(x)`, which
bypasses it, each rank keeps its local gradients, although the loss is right.

A parameter does not refer to the engine that holds it, and torch keeps no list of engines. The garbage collector finds
the instances of DDP, once, in the first step. Other engines may reduce in a call after the step; for these `replicas`
compares parameters later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import _not_reduced
from .parameter_sync import Synchronized, parameters_of_ddp


def check_not_passed_by(
    name: str,
    reached: Iterable[Tensor],
    called: Iterable[nn.Module],
    engines: Iterable[Synchronized],
    unchecked: Iterable[Tensor] = (),
) -> None:
    """Check that a model has called the engines that hold the parameters which it trains.

    Args:
        name: of the model, for the message.
        reached: the leaves of its graph.
        called: the modules whose calls were observed. Parameters of other modules (compiled code calls these, or a
            function uses the parameter itself) are not checked.
        engines: those of them that an engine synchronizes, with all that they hold.
        unchecked: parameters for which the caller is responsible.

    Raises:
        ValueError: if a DistributedDataParallel of several ranks holds a parameter and was not called.
    """
    covered = {id(p) for engine in engines for p in engine.module.parameters()} | {id(p) for p in unchecked}
    inside = {id(p) for module in called for p in module.parameters(recurse=False)}
    left = {id(p) for p in reached if id(p) in inside} - covered
    if not left:
        return
    for ddp in live_ddp():
        if ddp.process_group.size() == 1:
            continue
        for of, p in parameters_of_ddp(ddp):
            if id(p) in left:
                raise ValueError(
                    f"{name} must reach its parameters through the DistributedDataParallel that holds them, which "
                    f"reduces gradients only after its own forward pass, and reaches {of!r} without it: "
                    f"{_not_reduced.TITLE}. {_not_reduced.FIX}. Give GradCache the wrapped model, or functions that "
                    "call it; parameters that you reduce yourself go into unchecked="
                )


def live_ddp() -> Iterator[DistributedDataParallel]:
    """Return all instances of DistributedDataParallel in this process."""
    kinds = _with_subclasses(DistributedDataParallel)
    frozen = gc.get_freeze_count() > 0
    if frozen:  # it does not search frozen objects
        gc.unfreeze()
    found = [x for x in gc.get_referrers(*kinds) if issubclass(type(x), DistributedDataParallel)]
    if frozen:
        gc.freeze()
    return iter(found)


def _with_subclasses(kind: type) -> list[type]:
    found = [kind]
    for one in found:  # which grows
        found += one.__subclasses__()
    return found
