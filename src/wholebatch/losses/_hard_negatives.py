"""Hard negatives of single queries, (b, h, d): each counts for its query alone and stays on its rank.

    S_ic = scale q_i . n_ic,    A'_i = logsumexp_c S_ic

Plain PyTorch computes their statistics from b h products, and combines them with those of the sweep:
A = log(exp A + exp A'), and likewise for the other fields.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._base.checks import check_ids, is_dense
from .._base.precision import wide_dtype
from ..contract import Facts
from ..nodes import RowStatistics
from ._directions import Ceiling


def rows_of(hard_negatives: Tensor | None) -> Tensor | None:
    """Return (b, h, d) as (b h, d), and other shapes as they are: the check refuses them."""
    return hard_negatives.flatten(0, 1) if is_dense(hard_negatives) and hard_negatives.dim() == 3 else hard_negatives


def check_hard_negatives(queries: Tensor, hard_negatives: Tensor, hard_negative_ids: Tensor | None) -> None:
    """Raise ValueError unless there are (b, h, d) hard negatives and, if given, (b, h) ids."""
    if hard_negatives.dim() != 3 or len(hard_negatives) != len(queries):
        raise ValueError(
            f"hard_negatives must have shape ({len(queries)}, per query, embedding size), got "
            f"{tuple(hard_negatives.shape)}; pass those that count for all queries as negatives"
        )
    if hard_negative_ids is None:
        return
    shape = tuple(hard_negatives.shape[:2])
    if is_dense(hard_negative_ids) and hard_negative_ids.shape != shape:
        raise ValueError(
            f"hard_negative_ids must have shape {shape}, one for each of hard_negatives, "
            f"got {tuple(hard_negative_ids.shape)}"
        )
    flat = hard_negative_ids.flatten() if is_dense(hard_negative_ids) else hard_negative_ids
    check_ids("hard_negative_ids", flat, "hard_negatives", math.prod(shape))


def hard_negative_statistics(
    facts: Facts, shape: torch.Size, hardness: float, ceiling: Ceiling | None, excluded: Tensor | None
) -> RowStatistics:
    """Return the statistics of each query over its hard negatives, whose shape (b, h, d) is given."""
    queries, negatives = (facts.inputs[name].to(facts.dtype) for name in ("queries", "hard_negatives"))
    similarities = torch.einsum("bd,bhd->bh", queries, negatives.view(shape))
    scale = facts.inputs["logit_scale"]
    logits = (scale * similarities + hardness * similarities.detach()).to(wide_dtype(facts.device))
    lowest = torch.finfo(logits.dtype).min / 4
    among = torch.ones_like(logits, dtype=torch.bool)
    if ceiling is not None and ceiling.query_guides is None:
        among = similarities.detach() <= ceiling.largest[:, None]
    if excluded is not None:
        among = among & ~excluded
    if not shape[1]:
        nothing = logits.new_zeros(shape[0])
        return RowStatistics(nothing + lowest, None, nothing, nothing, nothing - math.inf, nothing)
    logits = logits.masked_fill(~among, lowest)
    logsumexp = logits.logsumexp(1)
    largest = (facts.scalars["logit_scale"] * similarities.detach().to(logits)).masked_fill(~among, -math.inf).amax(1)
    squares = (2 * (logits - logsumexp[:, None])).detach().exp().sum(1)
    return RowStatistics(
        logsumexp,
        logits=torch.where(among, logits, 0.0).sum(1),
        count=among.sum(1).to(logits),
        largest=largest,
        effective=1 / squares,
    )


def combined(first: RowStatistics, second: RowStatistics) -> RowStatistics:
    """Return the statistics over the candidates of both; the target is the first one's."""
    assert second.logits is not None
    assert second.count is not None
    assert second.largest is not None
    assert second.effective is not None
    lowest = torch.finfo(first.logsumexp.dtype).min / 4
    logsumexp = torch.logaddexp(first.logsumexp.clamp(min=lowest), second.logsumexp)
    effective = None
    if first.effective is not None:
        parts = zip((first, second), (first.effective, second.effective), strict=True)
        squares = torch.zeros_like(logsumexp)
        for side, effective_count in parts:
            share = (side.logsumexp - logsumexp).detach().exp()
            squares = squares + torch.where(effective_count > 0, share.square() / effective_count, 0.0)
        effective = 1 / squares
    return RowStatistics(
        logsumexp,
        first.target,
        None if first.logits is None else first.logits + second.logits,
        None if first.count is None else first.count + second.count,
        None if first.largest is None else torch.maximum(first.largest, second.largest),
        effective,
    )
