"""If one rank raises in a step, all ranks raise, and gradients are as they were; otherwise all go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from ..comm import Communicator
from ..comm.handshake import raised_on_all_ranks
from .engines.known import Synchronized

_T = TypeVar("_T")


def agree(comm: Communicator, state: Callable[[], Any], *, caller: str = "GradCache") -> list[Any]:
    """Return each rank's state(), a JSON value; if it raises on one rank, raise on all.

    That rank raises its error, the others a ValueError with its text.
    """
    if comm.size == 1:
        return [state()]
    try:
        everyone = comm.handshake(lambda: {"found": state()}, caller=caller)
    except ValueError as error:
        cause = error.__cause__  # what state() has raised here
        if cause is not None and not isinstance(cause, ValueError):
            raise cause from None
        raise
    return [rank_facts["found"] for rank_facts in everyone]


def agree_after(
    comm: Communicator, compute: Callable[[], _T], state: Callable[[], Any], *, caller: str = "GradCache"
) -> tuple[_T, list[Any]]:
    """Return compute(), which may communicate, and each rank's state() after it; if one raises on a rank, all raise."""
    result, failed = list[_T](), None
    try:
        result.append(compute())
    except Exception as error:
        if comm.size == 1 or raised_on_all_ranks(error, comm.transport):
            raise
        failed = error

    def facts() -> Any:
        raise_error(failed)
        return state()

    everyone = agree(comm, facts, caller=caller)
    return result[0], everyone


def raise_error(error: Exception | None) -> None:
    """Raise the error, if there is one."""
    if error is not None:
        raise error


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
