"""Distillation of one similarity matrix into another: CLIP's loss with the softmax of a teacher as targets.

    S = scale X Y^T of the student,    T = teacher_scale X' Y'^T of the teacher
    L = 1/(2B) [ sum_i (logsumexp_j S_ij - sum_j P_ij S_ij) + sum_j (logsumexp_i S_ij - sum_i Q_ij S_ij) ]

with P and Q the softmax of T's rows and of its columns. Neither matrix is stored. A sweep without gradient gives the
logsumexps of T, another those of S. A third one gives the means under P and Q of S minus its logsumexp (see
`sweep.soft_targets`), and the whole gradient:

    L_i = -sum_j P_ij (S_ij - C_i),    C_i = logsumexp_j S_ij

This is a sum of terms of one sign. Logsumexps are float64, but tiles are float32. Rounding C_i to float32 costs a part
in 10^5 at a scale of 100, which is corrected outside of the tiles. A C_i of 10^16 no longer contains the number of
largest entries; this is corrected there as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_alike, check_features, check_norm, norm_bound
from ..contract import (
    Checks,
    Facts,
    Inputs,
    Options,
    ProductOptions,
    Reduction,
    agree,
    entry,
    form_of_tensor,
    reduce_losses,
)
from ..nodes import Bounds, Layout, Operands, Towers, choose_route, row_statistics, statistics_fields
from ..nodes.matrix import matrix_of
from ..nodes.soft_targets import SoftTargetPlan, SoftTargets
from ..sweep import Pairs, Selection
from ._logit_scale import TakesLogitScale
from ._module import ProductLoss

_TEACHER_SIZE, _TEACHER_NORMS = "teacher's embedding size", "teacher's largest norms"


@entry
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
    **options: Unpack[ProductOptions],
) -> Tensor:
    r"""Return the cross-entropy of a student's rows and columns against a teacher's, over the pairs of all ranks.

    L = (CE(S, softmax(T)) + CE(S^T, softmax(T^T))) / 2,    S = logit_scale X Y^T,    T = teacher_logit_scale X' Y'^T.

    Args:
        image_features: X_r, (b_r, d), this rank's rows as they are: the caller normalizes. b_r may differ between
            ranks and may be 0. float64, float32, bfloat16 or float16.
        text_features: Y_r, (b_r, d); row i belongs to row i of X_r.
        logit_scale: the student's; a number or a tensor of shape () or [1], the same on all ranks.
        teacher_image_features: X'_r, (b_r, d'), the teacher's of the same images; they get no gradient.
        teacher_text_features: Y'_r, (b_r, d').
        teacher_logit_scale: the teacher's; a number or a tensor of one element, which gets no gradient.
        weights: (b_r,), one for each pair, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": L_i of this rank's pairs; see :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.ProductOptions`. Nothing is kept.

    Returns:
        L, the same on every rank: `wholebatch.reference.distillation_loss` of the whole batch, at least in float32.

    Collectives: those of three forward passes and a backward pass of :func:`wholebatch.functional.clip_loss`.
    Work: 8 units of b_r B d multiply-adds per rank if d' = d: 3 for the teacher, 5 for the student. Memory beyond
    inputs and gradients: four tiles and O(b_r), and on several ranks the exchange's memory for [Y, Y'].

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for teacher's features with another number of rows than the student's, and a d' that differs between
            ranks.
        RuntimeError: if the gradient is differentiated again.

    Source: Hinton et al., 2015, arXiv:1503.02531; for two towers, Wu et al., 2023, arXiv:2309.12314, equation 7.

    >>> import torch, wholebatch as wb
    >>> x = torch.eye(3)
    >>> wb.functional.distillation_loss(x, x, 10.0, x, x, 2.0)
    tensor(2.1302)
    """
    teacher = {"teacher_image_features": teacher_image_features, "teacher_text_features": teacher_text_features}

    def check() -> dict[str, Any]:
        for name, features in teacher.items():
            check_features(name, features)
            if features.device != image_features.device:
                raise ValueError(f"{name} must be on {image_features.device}, got {features.device}; move it there")
            if len(features) != len(image_features):
                raise ValueError(
                    f"{name} must have as many rows as image_features, {len(image_features)}, got {len(features)}"
                )
        check_alike(*next(iter(teacher.items())), "teacher_text_features", teacher_text_features, rows=False)
        return {_TEACHER_SIZE: teacher_image_features.shape[1]}

    def derive(numbers: Mapping[str, float]) -> dict[str, Any]:
        return {_TEACHER_NORMS: [check_norm(name, x, numbers[name]) for name, x in teacher.items()]}

    constant_scale = teacher_logit_scale.detach() if isinstance(teacher_logit_scale, Tensor) else teacher_logit_scale
    facts = agree(
        "distillation_loss",
        Options(reduction=reduction, **options),
        Inputs(
            features={"image_features": image_features, "text_features": text_features},
            scalars={"logit_scale": logit_scale, "teacher_logit_scale": constant_scale},
            weights=(weights, "image_features"),
            paired=("image_features", "text_features"),
        ),
        Checks(
            check,
            read_back=lambda: {name: norm_bound(x) for name, x in teacher.items()},
            derive=derive,
            must_match=(_TEACHER_SIZE,),
            settings=(*map(form_of_tensor, teacher.values()),),
            reads="the norms of the teacher's rows bound the logits",
        ),
    )
    norms = facts.of_ranks(_TEACHER_NORMS)
    facts = facts.in_range(*(norm for rank_norms in norms for norm in rank_norms))
    layout = Layout(facts.rows["image_features"], facts.rows["image_features"])
    students = [facts.inputs["image_features"], facts.inputs["text_features"]]
    teachers = [x.detach().to(facts.dtype) for x in teacher.values()]
    scale, teacher_scale = facts.scalars["logit_scale"], facts.scalars["teacher_logit_scale"]
    s, t = (matrix_of(facts, layout, *towers) for towers in (students, teachers))
    if s is not None and t is not None:
        logits, targets = s * facts.inputs["logit_scale"], t * teacher_scale
        losses = [-(targets.softmax(dim) * logits.log_softmax(dim)).sum(dim) for dim in (1, 0)]
        return reduce_losses(facts, (losses[0] + losses[1]) / 2, layout.rows.total)
    with torch.no_grad():
        bound = max(norm[0] for norm in norms) * max(norm[1] for norm in norms)
        teacher_lse = _logsumexps(facts, teacher_scale, teachers, layout, bound)
        bound = facts.norms["image_features"] * facts.norms["text_features"]
        student_lse = _logsumexps(facts, scale, students, layout, bound)
    plan = SoftTargetPlan(choose_route(facts, layout, keep=False), scale, teacher_scale, layout.rows.total)
    losses = SoftTargets.apply(plan, facts.inputs["logit_scale"], *teachers, *teacher_lse, *student_lse, *students)
    return reduce_losses(facts, (losses[0] + losses[1]) / 2, layout.rows.total)


def _logsumexps(facts: Facts, scale: float, towers: Sequence[Tensor], layout: Layout, bound: float) -> list[Tensor]:
    """Return the logsumexps over all entries of this rank's rows, and of its columns."""
    fields = statistics_fields(target=False)
    operands = Operands(towers, Towers(stays=(0,), travels=(1,)), layout)
    sides = row_statistics(facts, (scale, scale), operands, Selection(Pairs()), Bounds(bound), rows=fields, cols=fields)
    return [side.logsumexp for side in sides if side is not None]


class DistillationLoss(TakesLogitScale, ProductLoss):
    """Distillation over the global batch: the settings of :func:`wholebatch.functional.distillation_loss`.

    Args:
        logit_scale: default for calls that leave it out, as in :class:`wholebatch.CLIPLoss`.
    """

    @entry
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float | None = None,
        teacher_image_features: Tensor | None = None,
        teacher_text_features: Tensor | None = None,
        teacher_logit_scale: Tensor | float | None = None,
        *,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.distillation_loss`: two pairs of (b_r, d) and their scales -> L.

        Each call needs the three arguments of the teacher; where the constructor has `logit_scale`, pass them by name.
        """
        return distillation_loss(
            image_features,
            text_features,
            weights=weights,
            **self._settings_of_call(
                logit_scale=logit_scale,
                teacher_image_features=teacher_image_features,
                teacher_text_features=teacher_text_features,
                teacher_logit_scale=teacher_logit_scale,
            ),
        )
