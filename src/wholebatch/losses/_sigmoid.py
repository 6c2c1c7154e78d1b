"""A loss that is a sum over the entries of S, as one autograd node: the gradient is computed in the forward pass.

    L = 1 / n sum_ij -log sigmoid(z_ij S_ij)

All that the backward pass does is multiply by the incoming gradient. It may do so in place, since nobody else holds
these gradients, but only once: a second backward pass through the same graph sweeps again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._once import once_differentiable
from .._precision import accumulation_dtype, wide_dtype
from ..comm import Communicator
from ..exchange import Exchange
from ..sweep import Block, Budget, Driver, Pairs, SigmoidSweep
from ..sync import Sync, feature_factor, total_or_share
from ._towers import inner, no_autocast


@dataclass(frozen=True)
class SigmoidPlan:
    """What forward and backward of one call have in common."""

    comm: Communicator
    exchange: Exchange
    pairs: Pairs
    scale: float
    bias: float
    rows: int  # n, what the sum over all entries is divided by
    budget: Budget
    sync: Sync
    differentiable: bool  # whether a backward pass may follow


@dataclass(frozen=True)
class _Gradients:
    """n times the gradient with respect to S, times Y and X; for scale and bias, what they carry under `sync`."""

    u: Tensor | None
    v: Tensor | None
    scale: Tensor
    bias: Tensor


class Sigmoid(torch.autograd.Function):
    """L of X and Y."""

    @staticmethod
    @no_autocast
    def forward(ctx: Any, plan: SigmoidPlan, scale: Any, bias: Any, x: Tensor, y: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[1:] if plan.differentiable else (False,) * 4
        loss, gradients = _sweep(plan, x, y, wanted)
        ctx.plan, ctx.gradients = plan, gradients
        scale, bias = (value if isinstance(value, Tensor) else None for value in (scale, bias))
        ctx.save_for_backward(scale, bias, x, y)
        return loss.to(accumulation_dtype(x.dtype))

    # With G = n dS, U = G Y and V = G^T X,
    #
    #     dL/dX     = scale / n U
    #     dL/dY     = scale / n V, summed over the ranks
    #     dL/dscale = 1 / n sum_ij G_ij x_i . y_j = 1 / n <X, U> = 1 / n <Y, V>, summed over the ranks
    #     dL/dbias  = 1 / n sum_ij G_ij, summed over the ranks
    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:
        plan: SigmoidPlan = ctx.plan
        scale, bias, x, y = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        of_s: _Gradients | None
        of_s, ctx.gradients = ctx.gradients, None
        if of_s is None:
            _, of_s = _sweep(plan, x, y, wanted)
        want_scale, want_bias, want_x, want_y = wanted
        factor = grad_loss * (plan.scale / plan.rows * feature_factor(plan.sync, plan.comm.size))
        grad_x = of_s.u.mul_(factor).to(x.dtype) if want_x and of_s.u is not None else None
        grad_y = of_s.v.mul_(factor).to(y.dtype) if want_y and of_s.v is not None else None
        grad_scale = (grad_loss * of_s.scale).to(scale).view_as(scale) if want_scale else None
        grad_bias = (grad_loss * of_s.bias).to(bias).view_as(bias) if want_bias else None
        return None, grad_scale, grad_bias, grad_x, grad_y


def _sweep(plan: SigmoidPlan, x: Tensor, y: Tensor, wanted: tuple[bool, ...]) -> tuple[Tensor, _Gradients]:
    """L, and what the backward pass multiplies."""
    want_scale, want_bias, want_x, want_y = wanted
    want_x = want_x or (want_scale and not want_y)
    dtype = accumulation_dtype(x.dtype)
    driver = Driver(x, plan.scale, plan.bias, side=plan.budget.side, largest=plan.exchange.largest_block)
    sweep = SigmoidSweep(driver, plan.pairs, wide_dtype(x.device))
    u = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if want_x else None

    def visit(block: Block, _carried: Tensor | None, into: Tensor | None, _own: Tensor | None) -> None:
        sweep.block(block, u, into, bias=want_bias)

    initial = x.new_zeros(1, x.shape[1], dtype=dtype) if want_y else None
    v = plan.exchange.collect(plan.exchange.bring(y), visit, initial=initial)
    v = None if v is None else plan.exchange.home(v)
    grad_scale = torch.zeros_like(sweep.loss)
    if want_scale:
        grad_scale = inner(y, v) if v is not None else inner(x, u)
    numbers = torch.stack([sweep.loss, grad_scale, sweep.grad_bias]) / plan.rows
    total = plan.comm.all_reduce(numbers, check=False)
    _, grad_scale, grad_bias = total_or_share(total, numbers, plan.sync)
    return total[0].clone(), _Gradients(u, v, grad_scale, grad_bias)
