"""Hard negatives of a query's own: (b, h, d), which count for it alone, and never leave its rank.

    S_ic = scale q_i . n_ic,    A'_i = logsumexp_c S_ic

Their numbers are b h products of plain PyTorch, put together with those of the sweep: A = log(exp A + exp A'), and the
rest likewise.
"""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch import Tensor

from .._checks import check_ids, is_dense
from .._precision import wide_dtype
from ._directions import Ceiling
from ._door import Agreement
from ._softmax import Numbers


def as_rows(hard_negatives: Tensor | None) -> Tensor | None:
    """(b, h, d) as (b h, d); what has another shape is refused by the check."""
    return hard_negatives.flatten(0, 1) if _is_cube(hard_negatives) else hard_negatives


def check_own_negatives(queries: Tensor, hard_negatives: Tensor, hard_negative_ids: Tensor | None) -> None:
    """Raise ValueError unless each query has its own, and each of them its id, if any has."""
    if hard_negatives.dim() != 3 or len(hard_negatives) != len(queries):
        raise ValueError(
            f"hard_negatives must have shape ({len(queries)}, per query, feature size), got "
            f"{tuple(hard_negatives.shape)}; what counts for all queries goes into negatives"
        )
    if hard_negative_ids is None:
        return
    shape = tuple(hard_negatives.shape[:2])
    if isinstance(hard_negative_ids, Tensor) and hard_negative_ids.shape != shape:
        raise ValueError(
            f"hard_negative_ids must have shape {shape}, one for each of hard_negatives, "
            f"got {tuple(hard_negative_ids.shape)}"
        )
    flat = hard_negative_ids.flatten() if isinstance(hard_negative_ids, Tensor) else hard_negative_ids
    check_ids("hard_negative_ids", flat, "hard_negatives", math.prod(shape))


def _is_cube(x: object) -> TypeGuard[Tensor]:
    return is_dense(x) and x.dim() == 3


def own_negatives(
    agreed: Agreement, shape: torch.Size, hardness: float, ceiling: Ceiling | None, excluded: Tensor | None
) -> Numbers:
    """The numbers of each query's own negatives, (b, h, d): h products for each."""
    queries, negatives = (agreed.inputs[name].to(agreed.dtype) for name in ("queries", "hard_negatives"))
    similarities = torch.einsum("bd,bhd->bh", queries, negatives.view(shape))
    scale = agreed.inputs["logit_scale"]
    logits = (scale * similarities + hardness * similarities.detach()).to(wide_dtype(agreed.device))
    least = torch.finfo(logits.dtype).min / 4
    among = torch.ones_like(logits, dtype=torch.bool)
    if ceiling is not None and ceiling.query_guides is None:
        among = similarities.detach() <= ceiling.largest[:, None]
    if excluded is not None:
        among = among & ~excluded
    if not shape[1]:
        nothing = logits.new_zeros(shape[0])
        return Numbers(nothing + least, None, nothing, nothing, nothing - math.inf, nothing)
    logits = logits.masked_fill(~among, least)
    logsumexp = logits.logsumexp(1)
    largest = (agreed.scalars["logit_scale"] * similarities.detach().to(logits)).masked_fill(~among, -math.inf).amax(1)
    squares = (2 * (logits - logsumexp[:, None])).detach().exp().sum(1)
    return Numbers(
        logsumexp,
        logits=torch.where(among, logits, 0.0).sum(1),
        count=among.sum(1).to(logits),
        largest=largest,
        effective=1 / squares,
    )


def together(one: Numbers, other: Numbers) -> Numbers:
    """Of the candidates of both; the target is the one's."""
    assert other.logits is not None
    assert other.count is not None
    assert other.largest is not None
    assert other.effective is not None
    least = torch.finfo(one.logsumexp.dtype).min / 4
    logsumexp = torch.logaddexp(one.logsumexp.clamp(min=least), other.logsumexp)
    effective = None
    if one.effective is not None:
        parts = zip((one, other), (one.effective, other.effective), strict=True)
        squares = torch.zeros_like(logsumexp)
        for side, of_side in parts:
            share = (side.logsumexp - logsumexp).detach().exp()
            squares = squares + torch.where(of_side > 0, share.square() / of_side, 0.0)
        effective = 1 / squares
    return Numbers(
        logsumexp,
        one.target,
        None if one.logits is None else one.logits + other.logits,
        None if one.count is None else one.count + other.count,
        None if one.largest is None else torch.maximum(one.largest, other.largest),
        effective,
    )
