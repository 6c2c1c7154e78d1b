"""Distillation of one similarity matrix into another: CLIP's loss with a teacher's softmax for targets.

    S = scale X Y^T of the student,    T = teacher_scale X' Y'^T of the teacher
    L = 1/(2B) [ sum_i (logsumexp_j S_ij - sum_j P_ij S_ij) + sum_j (logsumexp_i S_ij - sum_i Q_ij S_ij) ]

with P and Q the softmax of T's rows and of its columns. Neither matrix is stored. A sweep without gradient gives T's
logsumexps; another those of S; a third the mean of S under P and Q (see `sweep.soft_targets`), less that logsumexp, and
all of the gradient:

    L_i = -sum_j P_ij (S_ij - C_i),    C_i = logsumexp_j S_ij

a sum of terms of one sign. A logsumexp is known in float64, and tiles are of float32: what its rounding there leaves, a
part in 10^5 at a scale of 100, is made up for outside of the tiles; and so is what is lost of one of 10^16, which no
longer knows how many are largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._autograd import once_differentiable
from .._checks import check_alike, check_features, largest_norm
from .._precision import accumulation_dtype, wide_dtype
from ..comm import Group
from ..exchange import Exchange, ExchangeName
from ..sweep import Block, Budget, Driver, Memory, Pairs, Selection, SoftTargetSweep
from ..sync import Sync
from ._door import LossModule, Options, Reduction, agree, eager
from ._softmax import softmax_numbers, wanted
from ._towers import Towers, inner, no_autocast

_LOST = 1e-3  # more than float32's rounding of such a sum


@eager
def distillation_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    teacher_image_features: Tensor,
    teacher_text_features: Tensor,
    teacher_logit_scale: Tensor | float,
    *,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
) -> Tensor:
    r"""Cross-entropy of the student's rows and columns against the teacher's, over the pairs of all ranks.

    L = (CE(S, softmax(T)) + CE(S^T, softmax(T^T))) / 2,    S = logit_scale X Y^T,    T = teacher_logit_scale X' Y'^T.

    Args:
        image_features: X_r, (b_r, d), this rank's rows as they are: the caller normalizes. b_r may differ between
            ranks and may be 0. float64, float32, bfloat16 or float16.
        text_features: Y_r, (b_r, d); row i belongs to row i of X_r.
        logit_scale: of the student; a number or a tensor of shape () or [1], the same on all ranks.
        teacher_image_features: X'_r, (b_r, d'), of the same images; they receive no gradient.
        teacher_text_features: Y'_r, (b_r, d').
        teacher_logit_scale: of the teacher, a number or a tensor of one element, without gradient.
        weights: (b_r,), of the pairs, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": L_i of this rank's pairs; see :func:`wholebatch.functional.clip_loss`.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: "gather", "ring" or "auto", as there.
        memory: "flat", "auto" or bytes, as there; nothing is kept.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.distillation_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L, with the meaning of `sync` as in :func:`wholebatch.functional.clip_loss`.
    `backward` is called on every rank, with the same incoming gradient and in the same order as that of other losses;
    ranks that differ all raise ValueError.

    Work: 8 units of b_r B d multiply-adds per rank for features of equal width: of the teacher 3, of the student 5.
    Memory beyond inputs and gradients: four tiles and O(b_r), and on several ranks what the exchange takes for
    [Y, Y']. Collectives: those of three forward passes and a backward pass of :func:`wholebatch.functional.clip_loss`.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also teacher's features of other rows than the student's, or of different widths on the ranks.
        RuntimeError: if the gradient is differentiated again.

    Source: Hinton et al., 2015, arXiv:1503.02531; for two towers, Wu et al., 2023, arXiv:2309.12314, equation 7.

    >>> import torch, wholebatch as wb
    >>> x = torch.eye(3)
    >>> wb.functional.distillation_loss(x, x, 10.0, x, x, 2.0)
    tensor(2.1302)
    """

    def check() -> dict[str, Any]:
        teacher = {"teacher_image_features": teacher_image_features, "teacher_text_features": teacher_text_features}
        for name, features in teacher.items():
            check_features(name, features)
            if features.device != image_features.device:
                raise ValueError(f"{name} must be on {image_features.device}, got {features.device}; move it")
            if len(features) != len(image_features):
                raise ValueError(
                    f"{name} must have as many rows as image_features, {len(image_features)}, got {len(features)}"
                )
        check_alike(*next(iter(teacher.items())), "teacher_text_features", teacher_text_features, rows=False)
        return {
            "teacher's feature size": teacher_image_features.shape[1],
            "teacher's largest norms": [largest_norm(*item) for item in teacher.items()],
        }

    agreed = agree(
        "distillation_loss",
        Options(group, sync, exchange, memory, reduction),
        scalars={
            "logit_scale": logit_scale,
            "teacher_logit_scale": teacher_logit_scale.detach()
            if isinstance(teacher_logit_scale, Tensor)
            else teacher_logit_scale,
        },
        features={"image_features": image_features, "text_features": text_features},
        paired=("image_features", "text_features"),
        weights=(weights, "image_features"),
        check=check,
        must_match=("teacher's feature size",),
    )
    norms = agreed.facts("teacher's largest norms")
    agreed = agreed.in_range(*(norm for of_rank in norms for norm in of_rank))
    rows = agreed.rows["image_features"]
    local = [agreed.inputs["image_features"], agreed.inputs["text_features"]]
    of_teacher = [x.detach().to(agreed.dtype) for x in (teacher_image_features, teacher_text_features)]
    teacher_scale = agreed.scalars["teacher_logit_scale"]
    common: dict[str, Any] = {
        "towers": Towers(stays=(0,), travels=(1,)),
        "stays": rows,
        "travels": rows,
        "selection": Selection(Pairs()),
        "rows": wanted(target=False),
        "cols": wanted(target=False),
    }
    with torch.no_grad():
        bound = max(norm[0] for norm in norms) * max(norm[1] for norm in norms)
        targets = softmax_numbers(agreed, (teacher_scale, teacher_scale), of_teacher, bound=bound, **common)
        bound, scale = agreed.norms["image_features"] * agreed.norms["text_features"], agreed.scalars["logit_scale"]
        sides = softmax_numbers(agreed, (scale, scale), local, bound=bound, **common)
    how, budget = agreed.exchange(rows, rows, keep=False)
    of_targets, of_sides = ([side.logsumexp for side in both if side is not None] for both in (targets, sides))
    plan = _Plan(how, budget, scale, teacher_scale, rows.total)
    losses = _SoftTargets.apply(plan, agreed.inputs["logit_scale"], *of_teacher, *of_targets, *of_sides, *local)
    return agreed.reduce((losses[0] + losses[1]) / 2, rows.total)


@dataclass(frozen=True)
class _Plan:
    exchange: Exchange
    budget: Budget
    scale: float
    teacher_scale: float
    size: int  # N, of the batch

    def sweep(self, x: Tensor, teacher: Tensor) -> SoftTargetSweep:
        largest = self.exchange.largest_block
        student = Driver(x, self.scale, side=self.budget.side, largest=largest)
        return SoftTargetSweep(student, Driver(teacher, self.teacher_scale, side=self.budget.side, largest=largest))


class _SoftTargets(torch.autograd.Function):
    """Cross-entropies of this rank's rows and columns of S with the teacher's softmax for targets: (b,) and (b,)."""

    @staticmethod
    @no_autocast
    @eager
    def forward(
        ctx: Any,
        plan: _Plan,
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
        held = plan.exchange.fetch(torch.cat([y.to(teacher_y.dtype), teacher_y], dim=1))
        sweep, wide = plan.sweep(x, teacher_x), wide_dtype(x.device)
        of_rows = x.new_zeros(len(x), 3, dtype=wide)
        (row_lse, row_rest), (col_lse, col_rest), (row_near, row_short), (col_near, col_short) = (
            _split(known, teacher_x.dtype) for known in (row_lse, col_lse, row_near, col_near)
        )

        def visit(block: Block, carried: Tensor | None, into: Tensor | None, _local: Tensor | None) -> None:
            assert carried is not None
            assert into is not None
            sweep.sums(block, (row_lse, row_near, of_rows), (carried[0], carried[1], into))

        of_cols = plan.exchange.accumulate(
            held,
            visit,
            carried=plan.exchange.distribute(torch.stack([col_lse, col_near])),
            initial=x.new_zeros(1, 3, dtype=wide),
        )
        assert of_cols is not None
        of_cols = plan.exchange.reduce(of_cols, "sum")[plan.exchange.kept_local]
        ctx.plan = plan
        scale = scale if isinstance(scale, Tensor) else None
        rests = ((of_rows, row_rest, row_short), (of_cols, col_rest, col_short))
        of_teacher = [_lost(sums[:, 1], rest) for sums, rest, _ in rests]
        of_student = [_lost(sums[:, 2], rest) for sums, _, rest in rests]
        factors = [rest.neg().exp() for rest in (*of_teacher, *of_student)]
        ctx.save_for_backward(scale, teacher_x, row_lse, col_lse, row_near, col_near, *factors, x, y, held)
        return of_student[0] - factors[0] * of_rows[:, 0], of_student[1] - factors[1] * of_cols[:, 0]

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: _Plan = ctx.plan
        scale, teacher_x, row_lse, col_lse, row_near, col_near, *factors, x, y, held = ctx.saved_tensors
        want_scale, *_, want_x, want_y = ctx.needs_input_grad[1:]
        of_teacher, of_student = (
            [plan.size * factor * grad for factor, grad in zip(of, grads, strict=True)]
            for of in (factors[:2], factors[2:])
        )
        dtype, sweep = accumulation_dtype(x.dtype), plan.sweep(x, teacher_x)
        u = torch.zeros_like(x, dtype=dtype) if want_x or (want_scale and not want_y) else None

        def visit(block: Block, carried: Tensor | None, into: Tensor | None, _local: Tensor | None) -> None:
            assert carried is not None
            rows = (row_near, of_student[0]), (row_lse, of_teacher[0])
            sweep.gradients(block, rows, ((carried[0], carried[1]), (carried[2], carried[3])), u, into)

        v = plan.exchange.accumulate(
            held,
            visit,
            carried=plan.exchange.distribute(torch.stack([col_near, of_student[1], col_lse, of_teacher[1]])),
            initial=x.new_zeros(1, x.shape[1], dtype=dtype) if want_y else None,
            to_owner=True,
        )
        grad_scale = None
        if want_scale:
            share = inner(y, v) if v is not None else inner(x, u)
            grad_scale = (share / plan.size).to(scale).view_as(scale)
        factor = plan.scale / plan.size
        grad_x = u.mul_(factor).to(x.dtype) if want_x and u is not None else None
        grad_y = v.mul_(factor).to(y.dtype) if want_y and v is not None else None
        return None, grad_scale, *[None] * 6, grad_x, grad_y


def _split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x as what `dtype` holds of it, and the rest."""
    held = x.to(dtype).to(x)
    return held, x - held


def _lost(total: Tensor, rest: Tensor) -> Tensor:
    """The logarithm of a sum of exp(S - C): known to be this rest of C, unless C is so large that it has lost more."""
    found = total.clamp(min=torch.finfo(total.dtype).tiny).log()
    return torch.where((found - rest).abs() > _LOST, found, rest)


class DistillationLoss(LossModule):
    """A student's similarities against a teacher's, over the global batch.

    Args:
        reduction, group, sync, exchange, memory: as in :func:`wholebatch.functional.distillation_loss`.
    """

    def __init__(
        self,
        *,
        reduction: Reduction = "mean",
        group: Group = None,
        sync: Sync = "mean",
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
    ) -> None:
        super().__init__(reduction=reduction, group=group, sync=sync, exchange=exchange, memory=memory)

    @eager
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        teacher_image_features: Tensor,
        teacher_text_features: Tensor,
        teacher_logit_scale: Tensor | float,
        *,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.distillation_loss`: two pairs of (b_r, d) and their scales -> L."""
        return distillation_loss(
            image_features,
            text_features,
            logit_scale,
            teacher_image_features,
            teacher_text_features,
            teacher_logit_scale,
            weights=weights,
            **self.settings,
        )
