"""Restore gradients after a step that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from .engines.known import Synchronized


class Gradients:
    """Gradients as they were before a step, to be restored if it fails.

    While gradients accumulate, this holds a copy of them.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}
        self._put_back: dict[int, Callable[[], None]] = {}  # by the id of the engine's module

    def remember(self, tensors: Iterable[Tensor], engines: Iterable[Synchronized] = ()) -> None:
        """Remember the gradients of tensors, and those that engines keep to themselves."""
        for p in tensors:
            if p.requires_grad and id(p) not in self._before:
                self._before[id(p)] = p, p.grad, None if p.grad is None else p.grad.clone()
        for e in engines:
            if e.control.remember is not None and id(e.module) not in self._put_back:
                self._put_back[id(e.module)] = e.control.remember(e.module)

    def restore(self) -> None:
        """Restore the remembered gradients."""
        for p, grad, value in self._before.values():
            p.grad = grad
            if grad is not None and value is not None:
                grad.detach().copy_(value)
        for restore in self._put_back.values():
            restore()

    @contextmanager
    def restored_after_an_error(self) -> Iterator[None]:
        """Restore the remembered gradients if the code inside raises."""
        try:
            yield
        except BaseException:
            self.restore()
            raise
