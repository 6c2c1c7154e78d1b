"""Cross-entropy of one S with the softmax of another for targets, as an autograd node.

    L_i = -sum_j P_ij (S_ij - C_i),    C_i = logsumexp_j S_ij,    P the softmax of the teacher's rows

Logsumexps are computed in float64, tiles in float32. Rounding a logsumexp to float32 changes the weights by a part in
10^5 at a scale of 100; this is corrected outside of the tiles. So is the rounding of a logsumexp near 10^16 in float64,
which no longer shows how many logits share the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.precision import accumulation_dtype, inner, wide_dtype
from ..exchange import ColumnData, zeros
from ..sweep import Block, SoftTargetSweep
from .route import Route

_LOST = 1e-3  # the sums have a smaller rounding error in float32


@dataclass(frozen=True)
class SoftTargetPlan:
    """The facts that the forward and the backward pass of one call share."""

    route: Route
    scale: float
    teacher_scale: float
    size: int  # N, of the batch

    def sweep(self, x: Tensor, teacher: Tensor) -> SoftTargetSweep:
        """Return a sweep of the student's and the teacher's rows."""
        return SoftTargetSweep(self.route.driver(x, self.scale), self.route.driver(teacher, self.teacher_scale))


class SoftTargets(torch.autograd.Function):
    """Compute cross-entropies of the local rows and columns of S with the teacher's softmax as targets: (b,), (b,)."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any,
        plan: SoftTargetPlan,
        scale: Any,
        teacher_x: Tensor,
        teacher_y: Tensor,
        row_lse: Tensor,
        col_lse: Tensor,
        row_near: Tensor,
        col_near: Tensor,
        x: Tensor,
        y: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.dtypes = x.dtype, y.dtype
        rounded = plan.route.products.rounded
        x, y = rounded(x), rounded(y)
        teacher_x, teacher_y = (rounded(features).to(features.dtype) for features in (teacher_x, teacher_y))
        fetched = plan.route.exchange.fetch(torch.cat([y.to(teacher_y.dtype), teacher_y], dim=1))
        sweep, wide = plan.sweep(x, teacher_x), wide_dtype(x.device)
        row_sums = x.new_zeros(len(x), 3, dtype=wide)
        (row_lse, row_rest), (col_lse, col_rest), (row_near, row_short), (col_near, col_short) = (
            _split(known, teacher_x.dtype) for known in (row_lse, col_lse, row_near, col_near)
        )

        def visit(block: Block, columns: ColumnData) -> None:
            assert columns.carried is not None
            assert columns.accumulated is not None
            lse, near = columns.carried
            sweep.sums(block, (row_lse, row_near, row_sums), (lse, near, columns.accumulated))

        col_sums = plan.route.exchange.accumulate(
            fetched,
            visit,
            carried=plan.route.exchange.distribute(torch.stack([col_lse, col_near])),
            initial=zeros(x, 3, wide),
        )
        assert col_sums is not None
        col_sums = plan.route.exchange.reduce(col_sums, "sum")[plan.route.exchange.kept_local]
        ctx.plan = plan
        scale = scale if isinstance(scale, Tensor) else None
        rests = ((row_sums, row_rest, row_short), (col_sums, col_rest, col_short))
        teacher_lse = [_log_sum(sums[:, 1], rest) for sums, rest, _ in rests]
        student_lse = [_log_sum(sums[:, 2], rest) for sums, _, rest in rests]
        factors = [rest.neg().exp() for rest in (*teacher_lse, *student_lse)]
        ctx.save_for_backward(scale, teacher_x, row_lse, col_lse, row_near, col_near, *factors, x, y, fetched)
        return student_lse[0] - factors[0] * row_sums[:, 0], student_lse[1] - factors[1] * col_sums[:, 0]

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: SoftTargetPlan = ctx.plan
        scale, teacher_x, row_lse, col_lse, row_near, col_near, *factors, x, y, fetched = ctx.saved_tensors
        want_scale, *_, want_x, want_y = ctx.needs_input_grad[1:]
        teacher_lse, student_lse = (
            [plan.size * factor * grad for factor, grad in zip(model_factors, grads, strict=True)]
            for model_factors in (factors[:2], factors[2:])
        )
        dtype, sweep = accumulation_dtype(x.dtype), plan.sweep(x, teacher_x)
        u = torch.zeros_like(x, dtype=dtype) if want_x or (want_scale and not want_y) else None

        def visit(block: Block, columns: ColumnData) -> None:
            assert columns.carried is not None
            near, student, lse, teacher = columns.carried
            rows = (row_near, student_lse[0]), (row_lse, teacher_lse[0])
            sweep.gradients(block, rows, ((near, student), (lse, teacher)), u, columns.accumulated)

        v = plan.route.exchange.accumulate(
            fetched,
            visit,
            carried=plan.route.exchange.distribute(torch.stack([col_near, student_lse[1], col_lse, teacher_lse[1]])),
            initial=zeros(x, x.shape[1], dtype) if want_y else None,
            to_owner=True,
        )
        grad_scale = None
        if want_scale:
            share = inner(y, v) if v is not None else inner(x, u)
            grad_scale = (share / plan.size).to(scale).view_as(scale)
        factor = plan.scale / plan.size
        grad_x = u.mul_(factor).to(ctx.dtypes[0]) if want_x and u is not None else None
        grad_y = v.mul_(factor).to(ctx.dtypes[1]) if want_y and v is not None else None
        return None, grad_scale, *[None] * 6, grad_x, grad_y


def _split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x rounded to `dtype`, and the rest of it."""
    rounded = x.to(dtype).to(x)
    return rounded, x - rounded


def _log_sum(total: Tensor, rest: Tensor) -> Tensor:
    """Return the logarithm of a sum of exp(S - C): the rest of C, unless C is so large that float64 lost more."""
    log_total = total.clamp(min=torch.finfo(total.dtype).tiny).log()
    return torch.where((log_total - rest).abs() > _LOST, log_total, rest)
