"""The steps that the strategies of Lightning and of Fabric share: their methods have different names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

import wholebatch as wb

from ..._base.sparse_rows import coalesced
from ...comm import select_communicator
from ...heads.all_classes import (
    Heads,
    State,
    heads_of,
    keep_local_classes,
    local_optimizer_state,
    names_in,
    whole_optimizer_state,
    whole_state_dict,
)

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # read by DistributedDataParallel, and by Lightning


class ShardedHeads:
    """The heads of one strategy; the base of a strategy of either framework.

    `super()` of its subclasses is the framework's DDPStrategy.
    """

    _base: type  # the framework's class
    _kept: Heads | None = None

    @property
    def _heads(self) -> Heads:
        return self._kept or {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a strategy, for the launchers that start processes by spawning: its class is made at run time."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else dict(vars(self))
        return _new, (type(self).__bases__[0], self._base), state

    def _keep_apart(self, module: nn.Module, world_size: int) -> None:
        """Make DDP leave the heads of a module alone; a head that was created with all classes keeps the local ones.

        Raises:
            ValueError: if a head has another group than all processes.
        """
        found = heads_of(module)
        for name, head in found.items():
            size = select_communicator(head.options.group).size
            if size != world_size:
                raise ValueError(
                    f"group of the head {name!r} must be all {world_size} processes of the strategy, got a group of "
                    f"{size}; leave group out"
                )
            keep_local_classes(head)
        self._kept = {**self._heads, **found}
        if found:
            setattr(module, _IGNORED, [*{*getattr(module, _IGNORED, ()), *names_in(module)}])

    def _load_together(self, load: Callable[[], None]) -> None:
        """Load a module's state, and raise on all ranks if it does not fit one of them."""
        if not self._heads:
            load()
            return
        failed: RuntimeError | None = None

        def state() -> dict[str, object]:
            nonlocal failed
            try:
                load()
            except RuntimeError as error:  # torch's, about missing and unexpected names
                failed = error
            else:
                for head in self._heads.values():
                    head.check_local()
            return {"failed": failed is not None}

        everyone = select_communicator(None).handshake(state, caller="load_state_dict")
        if failed is not None:
            raise failed
        if any(of_rank["failed"] for of_rank in everyone):
            raise ValueError("another rank cannot load the state of the module; read that rank's error")

    def _whole_state_dict(self, state: State, module: nn.Module) -> State:
        return whole_state_dict(state, heads_of(module))

    def _whole_optimizer_state(self, state: State, optimizer: Optimizer) -> State:
        return whole_optimizer_state(state, optimizer, self._heads)

    def _watch_optimizer(self, optimizer: Optimizer) -> None:
        """Take the local rows of each state that the optimizer loads.

        Raises:
            ValueError: for an optimizer that shards parameters over the ranks, which heads are already.
        """
        if self._heads and hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"the optimizer must not be sharded over the ranks beside a head of sharded classes, got "
                f"{type(optimizer).__name__}: it overwrites parameters by another rank's. Pass another optimizer, such "
                "as SGD or AdamW of torch, or wholebatch.SparseSGD"
            )
        if getattr(optimizer, "_wholebatch_watched", False):
            return
        optimizer._wholebatch_watched = True  # type: ignore[attr-defined]
        optimizer.register_load_state_dict_pre_hook(
            lambda optimizer, state: local_optimizer_state(state, optimizer, self._heads)
        )

    def _sharded(self) -> list[Tensor]:
        return [p for head in self._heads.values() for p in (head.weight, head.bias) if p is not None]

    def _clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor | None:
        """Clip by the norm of the whole gradient, and return it; None if no head is among the parameters."""
        given, sharded = list(parameters), {id(p) for p in self._sharded()}
        local = [p for p in given if id(p) in sharded]
        if not local:
            return None
        return wb.heads.clip_grad_norm_([p for p in given if id(p) not in sharded], local, float(max_norm))


def agree_on_steps(scaler: GradScaler | None) -> None:
    """Let all ranks skip a step if any rank's gradient has overflowed, in its part of a head."""
    if scaler is None or "step" in vars(scaler):
        return
    step = scaler.step

    def agreed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        wb.heads.agree_on_overflow(scaler, optimizer)
        return step(optimizer, *args, **kwargs)

    scaler.step = agreed  # type: ignore[method-assign]


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clip each entry of each gradient; torch's function does not take sparse gradients."""
    given = [p for p in parameters if p.grad is not None]
    for p in given:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = coalesced(p.grad)
            p.grad._values().clamp_(-clip_value, clip_value)
    nn.utils.clip_grad_value_([p for p in given if p.grad is not None and not p.grad.is_sparse], clip_value)


@cache
def class_of(ours: type, base: type) -> type:
    """Return a subclass of our class and the framework's."""
    return type(base.__name__, (ours, base), {"_base": base, "__doc__": ours.__doc__})


def _new(ours: type, base: type) -> object:
    found = class_of(ours, base)
    make: Callable[[type], object] = object.__new__
    return make(found)
