"""Encoders that are called inside the forward pass of the DistributedDataParallel that holds them.

Lightning calls `training_step` inside the engine's forward pass, and `self.net` in it reaches the parameters directly.
The engine then waits for one gradient of each parameter in the backward pass of its output, the loss. A deferred step
makes its second passes in that backward pass, several for each parameter. So all but the last must not show themselves
to the engine, whose hooks run where autograd accumulates a gradient:

    all passes but the last    hidden: torch.autograd.grad, which accumulates nothing, and p.grad += g
    the last                   backward, as usual: the engine finds the sum in p.grad, and reduces it

This also holds inside of no_sync(), where the engine's hooks do nothing.
"""

from __future__ import annotations

from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel

from .chunks import Encoder
from .parameter_sync import SyncControl, Synchronized, parameters_of_ddp

# Its passes are not held by a switch; `accumulate` keeps them from the engine.
_CONTROL = SyncControl(
    lambda _module: False, lambda _module: nullcontext(), collective=False, hides=lambda _module: True
)


class Enclosing(Synchronized):
    """An engine whose forward pass has not ended, and whose parameters a step reaches directly."""

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__(module, _CONTROL)
        self.parameters = {id(p): p for _, p in parameters_of_ddp(module)}


def enclosed_by(encoder: Encoder) -> Enclosing | None:
    """Return the engine inside of whose forward pass the encoder was called, if it holds what the encoder trains.

    Raises:
        ValueError: if the engine counts the gradients of its parameters in the graph of its output, where the
            encoder's do not occur.
    """
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None or id(ddp) in encoder.synchronized:
        return None
    found = Enclosing(ddp)
    if not any(id(p) in found.parameters for p in encoder.leaves):
        return None
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(ddp, option):
            raise ValueError(
                f"{encoder.name} was called inside the forward pass of a DistributedDataParallel with {option}=True, "
                "which looks for its parameters in the graph of its output, before they are used: leave "
                f"{option} out, or give GradCache the engine's module and call it outside (in Lightning: "
                "automatic_optimization=False and self.trainer.strategy.model)"
            )
    return found
