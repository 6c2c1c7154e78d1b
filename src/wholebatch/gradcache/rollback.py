"""Restore gradients after a step that fails, and update buffers once per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from .parameter_sync import Synchronized
from .replay import Buffers


class Remember(Protocol):
    """Remember the gradients of tensors, and those that engines keep to themselves."""

    def __call__(self, tensors: Iterable[Tensor], engines: Iterable[Synchronized] = ()) -> None: ...


@contextmanager
def gradients_restored() -> Iterator[Remember]:
    """Restore the remembered gradients if the code inside raises.

    While gradients accumulate, this takes a copy of them.
    """
    before: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}
    put_back: list[Callable[[], None]] = []

    def remember(tensors: Iterable[Tensor], engines: Iterable[Synchronized] = ()) -> None:
        for p in tensors:
            if p.requires_grad and id(p) not in before:
                before[id(p)] = p, p.grad, None if p.grad is None else p.grad.clone()
        put_back.extend(e.control.remember(e.module) for e in engines if e.control.remember is not None)

    try:
        yield remember
    except BaseException:
        for p, grad, value in before.values():
            p.grad = grad
            if grad is not None and value is not None:
                grad.detach().copy_(value)
        for restore in put_back:
            restore()
        raise


@contextmanager
def moved_once(buffers: Buffers) -> Iterator[list[Tensor]]:
    """Give buffers, in the end, the state that was put into the list, or else leave them in their present one."""
    state: list[Tensor] = []
    try:
        yield state
    finally:
        buffers.restore(state or buffers.now())
