"""A loss that is a sum over the entries of S, as one autograd node: the gradient is computed in the forward pass.

    L = sum_i w_i l_i,        l_i = sum_j -log sigmoid(z_ij S_ij)

If the weights w_i are known in the forward pass, it computes the gradients, and the backward pass multiplies them by
the incoming gradient. It multiplies in place, because no other code holds these gradients. So it can do this once: a
second backward pass through the same graph makes another sweep. With reduction "none" the caller weighs the l_i, and
the backward pass makes a sweep with these weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.precision import accumulation_dtype, inner, wide_dtype
from ..comm.inside import all_reduce
from ..exchange import ColumnData, zeros
from ..sweep import Block, KernelSigmoidSweep, Pairs, SigmoidSweep
from .route import Route, unit_of_gradients


@dataclass(eq=False)
class SigmoidPlan:
    """The facts that the forward and the backward pass of one call share."""

    route: Route
    pairs: Pairs
    scale: float | Tensor
    bias: float | Tensor
    differentiable: bool  # whether a backward pass may follow
    per_row: bool  # whether the output is the l_i instead of their sum
    in_kernels: bool = False  # whether Triton kernels compute the tiles

    def sweep(self, x: Tensor, weights: Tensor | None) -> SigmoidSweep:
        """Return a sweep of X's rows."""
        driver = self.route.driver(x, self.scale, self.bias, in_units=True)
        wide = wide_dtype(x.device)
        if self.in_kernels:
            return KernelSigmoidSweep(driver, self.pairs, wide, self.route.exchange.columns.total, weights)
        return SigmoidSweep(driver, self.pairs, wide, weights)


@dataclass(eq=False)
class _Gradients:
    """G Y and G^T X of G = dL/dS, and this rank's share of dL/dscale and dL/dbias."""

    u: Tensor | None
    v: Tensor | None
    scale: Tensor
    bias: Tensor


class Sigmoid(torch.autograd.Function):
    """Compute a rank's share of L, or the l_i of its rows, from X, Y and weights, if any; and the l_i as constants."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any, plan: SigmoidPlan, scale: Any, bias: Any, weights: Tensor | None, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        early, dtypes = plan.differentiable and not plan.per_row, (x.dtype, y.dtype)
        x, y = (plan.route.products.rounded(features) for features in (x, y))
        want_scale, want_bias, _, want_x, want_y = ctx.needs_input_grad[1:] if early else (False,) * 5
        losses, gradients = _sweep(plan, x, y, weights, (want_scale, want_bias, want_x, want_y))
        ctx.plan, ctx.gradients, ctx.dtypes = plan, gradients if early else None, dtypes
        scale, bias = (value if isinstance(value, Tensor) else None for value in (scale, bias))
        ctx.save_for_backward(scale, bias, weights, x, y, losses)
        ctx.mark_non_differentiable(losses)
        if plan.per_row:
            return losses.clone(), losses
        return losses.sum() if weights is None else (weights * losses).sum(), losses

    # With G = dL/dS, U = G Y and V = G^T X,
    #
    #     dL/dX     = scale U
    #     dL/dY     = scale V, summed over the ranks
    #     dL/dscale = sum_ij G_ij x_i . y_j = <X, U> = <Y, V>, to be summed over the ranks
    #     dL/dbias  = sum_ij G_ij, to be summed over the ranks
    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        plan: SigmoidPlan = ctx.plan
        scale, bias, weights, x, y, losses = ctx.saved_tensors
        want_scale, want_bias, want_weights, want_x, want_y = ctx.needs_input_grad[1:]
        saved: _Gradients | None
        saved, ctx.gradients = ctx.gradients, None
        if saved is None:
            by_row = grad if plan.per_row else weights
            _, saved = _sweep(plan, x, y, by_row, (want_scale, want_bias, want_x, want_y))
        grad = grad.new_ones(()) if plan.per_row else grad
        factor = grad * plan.scale
        grad_x = saved.u.mul_(factor).to(ctx.dtypes[0]) if want_x and saved.u is not None else None
        grad_y = saved.v.mul_(factor).to(ctx.dtypes[1]) if want_y and saved.v is not None else None
        grad_scale = (grad * saved.scale).to(scale).view_as(scale) if want_scale else None
        grad_bias = (grad * saved.bias).to(bias).view_as(bias) if want_bias else None
        grad_weights = (grad * losses).to(weights) if want_weights else None
        return None, grad_scale, grad_bias, grad_weights, grad_x, grad_y


def _unit(plan: SigmoidPlan, x: Tensor, weights: Tensor | None) -> Tensor | None:
    """Return a number, (), the same on all ranks, such that dS / unit fits into float16; None for other dtypes."""
    if not plan.route.products.needs_unit(x.dtype, in_kernels=plan.in_kernels):
        return None
    largest = x.new_ones((), dtype=accumulation_dtype(x.dtype))
    if weights is not None:
        largest = weights.abs().amax().to(largest) if len(weights) else torch.zeros_like(largest)
        largest = all_reduce(plan.route.comm, largest, "max")
    return unit_of_gradients(largest)


def _sweep(
    plan: SigmoidPlan, x: Tensor, y: Tensor, weights: Tensor | None, needed: tuple[bool, ...]
) -> tuple[Tensor, _Gradients]:
    """Return the rows' l_i, and the gradients that the backward pass multiplies."""
    want_scale, want_bias, want_x, want_y = needed
    want_x = want_x or (want_scale and not want_y)
    dtype = accumulation_dtype(x.dtype)
    unit = _unit(plan, x, weights)
    if unit is not None:
        weights = (torch.ones_like(x[:, 0], dtype=dtype) if weights is None else weights) / unit
    sweep = plan.sweep(x, weights)
    u = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if want_x else None

    def visit(block: Block, columns: ColumnData) -> None:
        sweep.block(block, u, columns.accumulated, bias=want_bias)

    initial = zeros(x, x.shape[1], dtype) if want_y else None
    v = plan.route.exchange.accumulate(plan.route.exchange.fetch(y), visit, initial=initial, to_owner=True)
    if unit is not None:
        u, v = (None if gradient is None else gradient.mul_(unit) for gradient in (u, v))
        sweep.grad_bias.mul_(unit)
    grad_scale = torch.zeros_like(sweep.grad_bias)
    if want_scale:
        grad_scale = inner(y, v) if v is not None else inner(x, u)
    return sweep.losses, _Gradients(u, v, grad_scale, sweep.grad_bias)
