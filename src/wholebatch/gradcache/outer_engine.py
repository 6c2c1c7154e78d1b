"""Encoders that are called inside the forward pass of the DistributedDataParallel that holds them.

Lightning calls `training_step` inside the engine's forward pass. There `self.net` reaches the parameters directly, and
`self.trainer.strategy.model` calls the engine once more. The engine then waits for one gradient of each parameter in
the backward pass of the loss: from the end of its forward pass on, or, in manual optimization, from `manual_backward`
on. A deferred step makes its second passes in that backward pass, several for each parameter. So these call the
engine's module without the engine, which refuses calls until then; and all but the last must not show themselves to its
hooks, which run where autograd accumulates a gradient:

    all passes but the last    hidden: torch.autograd.grad, which accumulates nothing, and p.grad += g
    the last                   backward, as usual: the engine finds the sum in p.grad, and reduces it

This also holds if the caller is in no_sync(), where the engine's hooks do nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from .chunks import Encoder
from .engines.ddp import parameters_of_ddp
from .engines.known import Synchronized
from .engines.sync_control import SyncControl, with_attributes

_CONTROL = SyncControl(
    lambda _module: False,
    lambda ddp: with_attributes(ddp, forward=ddp.module.__call__),  # calls of the engine are calls of its module
    collective=False,
    hides=lambda _module: True,
)


class Enclosing(Synchronized):
    """An engine whose forward pass has not ended, and whose parameters a step reaches."""

    def __init__(
        self,
        module: DistributedDataParallel,
        reached: Iterable[Tensor],  # the leaves of the encoder's graph
        inner: Synchronized | None,  # as the encoder called it; None if it reaches the parameters directly
    ) -> None:
        super().__init__(module, _CONTROL)
        self.parameters = {id(p): p for _, p in parameters_of_ddp(module)}
        self.inner = inner
        self.reduced_early = False
        hooks = []
        if module.require_backward_grad_sync:
            early = partial(_note_early, weakref.ref(self))
            hooks = [p.register_post_accumulate_grad_hook(early) for p in reached if id(p) in self.parameters]
        self.unwatch = weakref.finalize(self, _remove, hooks)  # before the second passes, or when the step is freed

    def release(self) -> AbstractContextManager[None]:
        """Return a context for the last pass, whose forward pass is without the engine, too."""
        return self.hold()

    def waits(self) -> bool:
        """Return whether the engine waits for the gradients of a backward pass that it knows.

        DDP's forward pass clears this attribute in no_sync(), as in the step's first pass. It sets it where it prepares
        the engine for a backward pass; so does Lightning's `manual_backward`.
        """
        return self.inner is None or bool(self.module.require_forward_param_sync)

    def check(self, name: str) -> None:
        """Raise ValueError if the engine cannot wait for the second passes, or has not.

        It may have taken another gradient of the encoder's parameters for the only one.
        """
        self.unwatch()
        check_settings(name, self.module)
        if self.reduced_early:
            raise ValueError(
                f"{name} is called with and without gradient caching inside one forward pass of a "
                "DistributedDataParallel, or one of its parameters is also used outside of the cached call, and the "
                "engine reduces the first gradient of each parameter: cache all calls, and use parameters of an "
                "encoder (a weight to penalize, a scale) in the encoder, which may return them; or call the engine's "
                "module"
            )


def _note_early(engine: weakref.ref[Enclosing], _p: Tensor) -> None:
    enclosing = engine()
    if enclosing is not None:
        enclosing.reduced_early = True


def hooks_of_others(p: Tensor) -> list[Any]:
    """Return the hooks that run after a gradient of p has been accumulated, without those of this module."""
    hooks = getattr(p, "_post_accumulate_grad_hooks", None)
    return [] if not hooks else [hook for hook in hooks.values() if getattr(hook, "func", None) is not _note_early]


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def enclosed_by(encoder: Encoder) -> Enclosing | None:
    """Return the engine inside of whose forward pass the encoder was called, if it holds what the encoder trains."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None:
        return None
    called = encoder.calls.engines.get(id(ddp))
    held = {id(p) for _, p in parameters_of_ddp(ddp)}
    if called is None:
        if not any(id(p) in held for p in encoder.leaves):
            return None
        check_settings(encoder.name, ddp)
    return Enclosing(ddp, encoder.leaves, called)


def check_settings(name: str, ddp: Any) -> None:
    """Raise ValueError if the engine looks for its parameters in the graph of its output."""
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(ddp, option):
            raise ValueError(
                f"{name} was called inside the forward pass of a DistributedDataParallel with {option}=True, "
                "which looks for its parameters in the graph of its output, before they are used: leave "
                f"{option} out, or go backward in the step itself, without deferred=True (in Lightning: "
                "automatic_optimization=False, and wb.GradCache([self.trainer.strategy.model], ...))"
            )
