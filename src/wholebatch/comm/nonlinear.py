"""Maximum, minimum and product over the ranks, which are not linear and have no adjoint, with their gradients.

With g = sum_q y_bar_q over ranks for the sum of the ranks' losses, or y_bar itself for one replicated loss:

    y = max_q x_q     x_bar_r = g [x_r = y] / (number of ranks with x_q = y)      likewise min; as torch.amax does
    y = prod_q x_q    x_bar_r = g prod_{q /= r} x_q

The product of the others is taken from the product P of the nonzero factors and the number Z of zeros, so that it is
right where a factor is zero: P / x_r if Z = 0, P at the one zero if Z = 1, and 0 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._base.autograd import once_differentiable
from .._base.precision import accumulation_dtype
from .autograd import ALWAYS, apply, is_differentiable
from .maps import AllReduce, Loss, Map
from .order import Call
from .transport import Finish
from .wire import start_reduction


@dataclass(frozen=True)
class Reduction(Map):
    """Reduce elementwise: y = op_q x_q on every rank."""

    op: str

    def start(self, x: Tensor) -> Finish:
        return start_reduction(x, lambda wide: self.transport.all_reduce(wide, self.op))


def reduce_nonlinearly(x: Tensor, op: str, call: Call, loss: Loss) -> Tensor:
    """Return max_q x_q, min_q x_q or prod_q x_q on every rank, differentiable."""
    reduction = Reduction(call.transport, op)
    if not is_differentiable(x):
        return call.run(reduction, x)
    node = _Product if op == "prod" else _Extremum
    y, token = node.apply(x, ALWAYS, reduction, call, loss)
    call.keep(token)
    return y


class _Node(Function):
    """The node of a reduction; the subclasses have its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, always: Tensor, reduction: Reduction, call: Call, loss: Loss
    ) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.loss, ctx.reduction = call, loss, reduction
        y = call.run(reduction, x)
        ctx.save_for_backward(x, None if reduction.op == "prod" else y)
        return y, torch.empty(0, device="cpu")


class _Extremum(_Node):
    """The node of y = max_q x_q or min_q x_q."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _token: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.call.reached()
        x, y = ctx.saved_tensors
        total = _sum_over_losses(grad, ctx.call, ctx.loss)
        attained = (x == y).to(accumulation_dtype(grad.dtype))
        with torch.no_grad():
            ties = apply(AllReduce(ctx.call.transport), attained, ctx.call.adjoint)
        return (total * (attained / ties)).to(grad.dtype), None, None, None, None


class _Product(_Node):
    """The node of y = prod_q x_q."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _token: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.call.reached()
        x, _ = ctx.saved_tensors
        total = _sum_over_losses(grad, ctx.call, ctx.loss)
        wide = x.to(accumulation_dtype(x.dtype))
        is_zero = wide == 0
        nonzero = wide.masked_fill(is_zero, 1)
        product = ctx.call.adjoint.run(ctx.reduction, nonzero)
        zeros = apply(AllReduce(ctx.call.transport), is_zero.to(wide.dtype), ctx.call.adjoint)
        others = torch.where(is_zero, (zeros == 1) * product, (zeros == 0) * product / nonzero)
        return (total * others).to(grad.dtype), None, None, None, None


def _sum_over_losses(grad: Tensor, call: Call, loss: Loss) -> Tensor:
    """Return g: the cotangents of y, summed over the ranks' losses, or that of the one replicated loss."""
    adjoint = AllReduce(call.transport, loss=loss).adjoint
    call.adjoint.validate(adjoint)
    return apply(adjoint, grad, call.adjoint)
