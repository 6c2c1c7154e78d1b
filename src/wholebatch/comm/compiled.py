"""Collectives under torch.compile: some become part of the graph, all other communication breaks it.

A compiled graph cannot contain a handshake. all_gather, reduce_scatter, all_reduce and all_to_all need none over a
process group if counts are known and, for the first two, equal. These become torch's functional collectives. They are
not checked there, and their order is that of the graph, not that of `Communicator.backward`. Everything else breaks the
graph and runs eagerly; under `fullgraph=True` it is an error that names the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from .._base.autograd import outside_graphs
from .._base.precision import accumulation_dtype
from . import _c10d
from .binding import bound
from .maps import Loss
from .transport import Transport

REASON = (
    "wholebatch runs this communication outside the compiled graph. Inside it go, over a torch.distributed group: "
    "all_reduce of a sum or average (loss='sum'), all_gather and reduce_scatter with equal counts=, all_to_all with "
    "both counts"
)
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Ranks(Protocol):
    """The part of a communicator that a graph needs."""

    transport: Transport
    loss: Loss


def eager(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function: run it outside compiled graphs."""
    return outside_graphs(method, REASON)


def collective(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a communicator's method: run it outside compiled graphs, and raise on all ranks if its call is wrong."""
    return eager(bound(method, lambda error, args, kwargs: args[0]._refuse_call(method.__name__, error, kwargs)))


def compiles_to(functional: Callable[..., Tensor | None]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a method: `functional(...)` inside compiled graphs, unless it returns None; otherwise eagerly."""

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
    comm: Ranks, x: Tensor, *, counts: Sequence[int] | None = None, dim: int = 0, check: bool | None = None
) -> Tensor | None:
    """Concatenate the ranks' rows where their counts are known and equal; else return None."""
    group, rank, size = _group(comm), comm.transport.rank, comm.transport.size
    if group is None or counts is None or x.dim() == 0 or list(counts) != [x.shape[dim]] * size:
        return None
    x = x.movedim(dim, 0).contiguous()
    if comm.loss == "sum":
        return _c10d.functional.all_gather(x, gather_dim=0, group=group).movedim(0, dim)
    y = _c10d.functional.all_gather(x.detach(), gather_dim=0, group=group)
    start = rank * counts[0]
    return torch.cat([y[:start], x, y[start + counts[0] :]]).movedim(0, dim)


def reduce_scatter(
    comm: Ranks,
    x: Tensor,
    op: str = "sum",
    *,
    counts: Sequence[int] | None = None,
    dim: int = 0,
    check: bool | None = None,
) -> Tensor | None:
    """Sum or average, and distribute equal parts; where that is not asked for, return None."""
    group, size = _group(comm), comm.transport.size
    even = x.dim() > 0 and x.shape[dim] % size == 0
    even = even and (counts is None or list(counts) == [x.shape[dim] // size] * size)
    if group is None or not even or not _is_sum(op, x):
        return None
    wide = x.movedim(dim, 0).contiguous().to(accumulation_dtype(x.dtype))
    y = _c10d.functional.reduce_scatter(wide, "sum", scatter_dim=0, group=group)
    return (y / size if op == "avg" else y).to(x.dtype).movedim(0, dim)


def all_reduce(comm: Ranks, x: Tensor, op: str = "sum", *, check: bool | None = None) -> Tensor | None:
    """Sum or average on every rank; where that is not asked for, return None."""
    group, size = _group(comm), comm.transport.size
    if group is None or not _is_sum(op, x) or comm.loss == "replicated":
        return None
    wide = x.contiguous().to(accumulation_dtype(x.dtype))
    y = _c10d.functional.all_reduce(wide, "sum", group=group)
    return (y / size if op == "avg" else y).to(x.dtype)


def all_to_all(
    comm: Ranks,
    x: Tensor,
    *,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    dim: int = 0,
    check: bool | None = None,
) -> Tensor | None:
    """Exchange parts where both counts are known; else return None."""
    group = _group(comm)
    if group is None or send_counts is None or receive_counts is None:
        return None
    x = x.movedim(dim, 0).contiguous()
    y = _c10d.functional.all_to_all(x, list(receive_counts), list(send_counts), group=group)
    return y.movedim(0, dim)


def _is_sum(op: str, x: Tensor) -> bool:
    return op == "sum" or (op == "avg" and (x.is_floating_point() or x.is_complex()))


def _group(comm: Ranks) -> str | None:
    """Return the name of the process group, if there is one and it is open."""
    return None if comm.transport.closed else comm.transport.group_name
