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

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from .chunks import Encoder
from .engine_ddp import parameters_of_ddp
from .engines import Synchronized
from .sync_control import SyncControl

# Its passes are not held by a switch; `hidden_backward` keeps them from the engine.
_CONTROL = SyncControl(
    matches=lambda _module: False,
    hold=lambda _module: nullcontext(),
    collective=False,
    hides=lambda _module: True,
)


class Enclosing(Synchronized):
    """An engine whose forward pass has not ended, and whose parameters a step reaches directly.

    Args:
        module: of the engine.
        reached: the leaves of the encoder's graph.
    """

    def __init__(self, module: DistributedDataParallel, reached: Iterable[Tensor]) -> None:
        super().__init__(module, _CONTROL)
        self.parameters = {id(p): p for _, p in parameters_of_ddp(module)}
        self.reduced_early = False
        hooks = []
        if module.require_backward_grad_sync:
            early = partial(_note_early, weakref.ref(self))
            hooks = [p.register_post_accumulate_grad_hook(early) for p in reached if id(p) in self.parameters]
        self.unwatch = weakref.finalize(self, _remove, hooks)  # before the second passes, or when the step is freed

    def check(self, name: str) -> None:
        """Raise ValueError if the encoder's parameters got a gradient before the second passes.

        The engine has then taken that one for the only one.
        """
        self.unwatch()
        if self.reduced_early:
            raise ValueError(
                f"{name} is called with and without gradient caching inside one forward pass of a "
                "DistributedDataParallel, which reduces the first gradient of each parameter: cache both calls, or "
                "call the engine's module for both"
            )


def _note_early(engine: weakref.ref[Enclosing], _p: Tensor) -> None:
    found = engine()
    if found is not None:
        found.reduced_early = True


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def enclosed_by(encoder: Encoder) -> Enclosing | None:
    """Return the engine inside of whose forward pass the encoder was called, if it holds what the encoder trains.

    Raises:
        ValueError: if the engine counts the gradients of its parameters in the graph of its output, where the
            encoder's do not occur.
    """
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None or id(ddp) in encoder.synchronized:
        return None
    held = {id(p) for _, p in parameters_of_ddp(ddp)}
    if not any(id(p) in held for p in encoder.leaves):
        return None
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(ddp, option):
            raise ValueError(
                f"{encoder.name} was called inside the forward pass of a DistributedDataParallel with {option}=True, "
                "which looks for its parameters in the graph of its output, before they are used: leave "
                f"{option} out, or give GradCache the engine's module and call it outside (in Lightning: "
                "automatic_optimization=False and self.trainer.strategy.model)"
            )
    return Enclosing(ddp, encoder.leaves)
