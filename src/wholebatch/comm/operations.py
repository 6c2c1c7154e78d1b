"""The autograd nodes, duals side by side.

Every backward is the dual operation itself, so the nodes can be differentiated again. None of them writes into
the gradient that autograd hands over: another branch of the graph may hold the same tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Function

from .._precision import accumulation_dtype

if TYPE_CHECKING:
    from .communicator import Communicator


class AllGather(Function):
    """y = concat_r x_r on every rank.  <A x, y> = sum_r <x_r, sum_q y_q[rows r]>, hence A* = reduce_scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, counts: tuple[int, ...]) -> Tensor:
        ctx.comm, ctx.counts = comm, counts
        return comm._all_gather(x.contiguous(), counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ReduceScatter.apply(grad, ctx.comm, ctx.counts), None, None


class ReduceScatter(Function):
    """y_r = (sum_q x_q)[rows r].  The transpose of all_gather, hence A* = all_gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, counts: tuple[int, ...]) -> Tensor:
        ctx.comm, ctx.counts = comm, counts
        return comm._reduce_scatter(_summable(x), counts).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return AllGather.apply(grad, ctx.comm, ctx.counts), None, None


class AllReduce(Function):
    """y = sum_q x_q on every rank.  The matrix of ones (x) identity is symmetric, hence A* = all_reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm._all_reduce(_summable(x), "sum").to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AllReduce.apply(grad, ctx.comm), None


class Broadcast(Function):
    """y_r = x_root.  <A x, y> = <x_root, sum_r y_r>, hence A* = reduce to root, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, root: int) -> Tensor:
        ctx.comm, ctx.root = comm, root
        return comm._broadcast(x.contiguous(), root)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Reduce.apply(grad, ctx.comm, ctx.root), None, None


class Reduce(Function):
    """y_root = sum_r x_r, zero elsewhere.  The transpose of broadcast: A* = broadcast from root."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, root: int) -> Tensor:
        ctx.comm, ctx.root = comm, root
        return comm._reduce(_summable(x), root).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Broadcast.apply(grad, ctx.comm, ctx.root), None, None


def _summable(x: Tensor) -> Tensor:
    """X as the transports want it for a sum: contiguous, half precision widened to float32."""
    return x.to(accumulation_dtype(x.dtype)).contiguous()
