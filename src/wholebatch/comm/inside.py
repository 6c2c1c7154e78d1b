"""Collectives inside of a loss's pass: its entry has validated the call, and no gradient passes through them.

They do what the methods of :class:`Communicator` do with `check=False` under `torch.no_grad()`, in a third of Python's
calls. On one process the result is the argument itself.
"""

from __future__ import annotations

from torch import Tensor

from .communicator import Communicator
from .maps import AllGather, Map, ReduceScatter
from .nonlinear import Reduction
from .transport import named


def all_gather(comm: Communicator, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return all ranks' rows, of which each rank has as many as `counts` says: (n_r, ...) -> (n, ...)."""
    if comm.transport.size == 1:
        return x
    if comm.trace:
        return comm.all_gather(x, counts=counts, check=False)
    return _act(comm, "all_gather", AllGather(comm.transport, counts), x)


def all_reduce(comm: Communicator, x: Tensor, op: str = "sum") -> Tensor:
    """Return x reduced over the ranks, by "sum" or "max"."""
    if comm.transport.size == 1:
        return x
    if comm.trace:
        return comm.all_reduce(x, op, check=False)
    return _act(comm, "all_reduce", Reduction(comm.transport, op), x)


def reduce_scatter(comm: Communicator, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return the sum over the ranks of this rank's rows: (n, ...) -> (n_r, ...)."""
    if comm.transport.size == 1:
        return x
    if comm.trace:
        return comm.reduce_scatter(x, counts=counts, check=False)
    return _act(comm, "reduce_scatter", ReduceScatter(comm.transport, counts), x)


def _act(comm: Communicator, operation: str, map: Map, x: Tensor) -> Tensor:
    def act() -> Tensor:
        return map.start(x)()

    comm.transport.check_not_closed()
    return named(comm.transport, f"{operation} of a loss", "before", act)
