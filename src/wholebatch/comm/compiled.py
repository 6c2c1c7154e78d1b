"""Under torch.compile: what torch's functional collectives can express becomes part of the graph, the rest leaves it.

A compiled graph cannot hold a handshake. Inside it, all_gather, reduce_scatter, all_reduce and all_to_all become
functional collectives where they need none: over a process group, with counts that are known and, for the first two,
equal. They are then not checked and not part of `Communicator.backward`'s order; the graph is their order. Everything
else breaks the graph and runs as it does eagerly; `fullgraph=True` makes that an error with this reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._graph_break import outside_graphs
from .._precision import accumulation_dtype
from . import _c10d
from .binding import bound

if TYPE_CHECKING:
    from .communicator import Communicator

REASON = (
    "wholebatch runs this communication outside the compiled graph. Inside it go, over a torch.distributed group: "
    "all_reduce of a sum or average (loss='sum'), all_gather and reduce_scatter with equal counts=, all_to_all with "
    "both counts"
)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def eager(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: run outside compiled graphs."""
    return outside_graphs(method, REASON)


def collective(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: run a communicator's method outside compiled graphs; arguments that do not fit are told to all."""
    return eager(bound(method, lambda error, args, kwargs: args[0]._refuse_call(method.__name__, error, kwargs)))


def compiles_to(functional: Callable[..., Tensor | None]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator: `functional(...)` inside compiled graphs, unless it is None; otherwise the method, eagerly."""

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        eagerly = collective(method)

        @wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if torch.compiler.is_compiling():
                y = functional(*args, **kwargs)
                if y is not None:
                    return y  # type: ignore[return-value]
            return eagerly(*args, **kwargs)

        return call

    return decorate


def all_gather(
    comm: Communicator,
    x: Tensor,
    *,
    counts: Sequence[int] | None = None,
    dim: int = 0,
    check: bool | None = None,
) -> Tensor | None:
    """all_gather with known, equal counts."""
    group = _group(comm)
    if group is None or counts is None or x.dim() == 0 or list(counts) != [x.shape[dim]] * comm.size:
        return None
    x = x.movedim(dim, 0).contiguous()
    if comm.loss == "sum":
        return _c10d.functional.all_gather(x, gather_dim=0, group=group).movedim(0, dim)
    y = _c10d.functional.all_gather(x.detach(), gather_dim=0, group=group)
    start = comm.rank * counts[0]
    return torch.cat([y[:start], x, y[start + counts[0] :]]).movedim(0, dim)


def reduce_scatter(
    comm: Communicator,
    x: Tensor,
    op: str = "sum",
    *,
    counts: Sequence[int] | None = None,
    dim: int = 0,
    check: bool | None = None,
) -> Tensor | None:
    """reduce_scatter of a sum or average into equal parts."""
    group = _group(comm)
    even = x.dim() > 0 and x.shape[dim] % comm.size == 0
    even = even and (counts is None or list(counts) == [x.shape[dim] // comm.size] * comm.size)
    if group is None or not even or not _is_sum(op, x):
        return None
    wide = x.movedim(dim, 0).contiguous().to(accumulation_dtype(x.dtype))
    y = _c10d.functional.reduce_scatter(wide, "sum", scatter_dim=0, group=group)
    return (y / comm.size if op == "avg" else y).to(x.dtype).movedim(0, dim)


def all_reduce(comm: Communicator, x: Tensor, op: str = "sum", *, check: bool | None = None) -> Tensor | None:
    """all_reduce of a sum or average."""
    group = _group(comm)
    if group is None or not _is_sum(op, x) or comm.loss == "replicated":
        return None
    wide = x.contiguous().to(accumulation_dtype(x.dtype))
    y = _c10d.functional.all_reduce(wide, "sum", group=group)
    return (y / comm.size if op == "avg" else y).to(x.dtype)


def all_to_all(
    comm: Communicator,
    x: Tensor,
    *,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    dim: int = 0,
    check: bool | None = None,
) -> Tensor | None:
    """all_to_all with both counts known."""
    group = _group(comm)
    if group is None or send_counts is None or receive_counts is None:
        return None
    x = x.movedim(dim, 0).contiguous()
    y = _c10d.functional.all_to_all(x, list(receive_counts), list(send_counts), group=group)
    return y.movedim(0, dim)


def _is_sum(op: str, x: Tensor) -> bool:
    return op == "sum" or (op == "avg" and (x.is_floating_point() or x.is_complex()))


def _group(comm: Communicator) -> str | None:
    """The name of the process group, if there is one and it is open."""
    return None if comm.transport.closed else comm.transport.group_name
