"""Multi-similarity loss: soft maxima over the farthest positives and the nearest negatives of each row.

    L_i = 1/alpha log(1 + sum_{p in P(i)} exp(-alpha (c_ip - base)))
        + 1/beta  log(1 + sum_{n in N(i)} exp(  beta (c_in - base)))

with cosines c. Each term is the softplus of a logsumexp over some entries of a scaled S. Mining keeps the positives
with c_ip < max_n c_in + epsilon and the negatives with c_in > min_p c_ip - epsilon; this takes a pass more, and all of
S instead of half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_number
from ..contract import Checks, Options, ProductOptions, Reduction, entry
from ..logsumexp import softplus
from ..terms import LogSumExp, Max, Min, unequal
from ._declaration import Declaration
from ._labeled import LISTED, agree_labeled, same_class
from ._module import ProductLoss


def _positive(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    logit: Tensor = -p.alpha * (s - p.base)
    return logit


def _negative(s: Any, x: Any, y: Any, p: Any) -> Tensor:
    logit: Tensor = p.beta * (s - p.base)
    return logit


def _mined_positive(x: Any, y: Any, s: Any, p: Any) -> Tensor:
    mask: Tensor = same_class(x, y) & (s < x.nearest + p.epsilon)
    return mask


def _mined_negative(x: Any, y: Any, s: Any, p: Any) -> Tensor:
    mask: Tensor = (x.label != y.label) & (s > x.farthest - p.epsilon)
    return mask


_TERMS = {
    "positives": LogSumExp(_positive, same_class),
    "negatives": LogSumExp(_negative, unequal("label")),
}
_LIMITS = {
    "nearest": Max(where=unequal("label"), ties="split"),
    "farthest": Min(where=same_class, ties="split"),
}
_MINED = {
    "positives": LogSumExp(_positive, _mined_positive),
    "negatives": LogSumExp(_negative, _mined_negative),
}


@entry
def multi_similarity_loss(
    features: Tensor,
    labels: Tensor,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float | None = None,
    ignore_index: int | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[ProductOptions],
) -> Tensor:
    r"""Return soft maxima over each row's far positives and near negatives among the rows of all ranks.

    L_i = log(1 + sum_{p in P(i)} exp(-alpha (c_ip - base))) / alpha
        + log(1 + sum_{n in N(i)} exp(  beta (c_in - base))) / beta

    with the cosines c of all ranks' rows; P(i): the others with i's label, N(i): those with another.

    Args:
        features: Z_r, (b_r, d), this rank's rows, or (b_r, v, d) for v views of each example; they are normalized
            inside. b_r may differ between ranks and may be 0. float64, float32, bfloat16 or float16.
        labels: (b_r,) integers >= 0, the class of each example.
        ignore_index: a label whose rows are left out, as in :func:`wholebatch.functional.sup_con_loss`.
        alpha: scale of the positives, > 0.
        beta: scale of the negatives, > 0.
        base: the similarity at which both have weight 1.
        epsilon: mining: only positives with c_ip < max_n c_in + epsilon, and negatives with c_in > min_p c_ip -
            epsilon, take part. The selection carries no gradient. In a row without positives or without negatives,
            nothing takes part. None: all take part.
        weights: (b_r,), one for each example, or (b_r, v), >= 0; the mean is sum w_i L_i / sum w_i.
        reduction: "mean", "sum", or "none": L_i of this rank's rows, (b_r,) or (b_r, v); see
            :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.ProductOptions`.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.multi_similarity_loss` on the
        concatenated batch. Its dtype is that of the features, float32 for half precision.

    A row without positives, or without negatives, lacks that term. Collectives: those of :class:`wholebatch.PairLoss`,
    with mining twice the forward ones. Work: 2 units of b_r B d multiply-adds per rank, 4.5 with mining; in kernels,
    which compute each term apart, 4. Memory: that of :func:`wholebatch.functional.nt_xent_loss` and four tiles more.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.sup_con_loss`;
            also for an alpha or beta that is not positive.
        RuntimeError: if the gradient is differentiated again.

    Source: Wang et al., 2019, arXiv:1904.06627, equations 9 (mining) and 10.

    >>> import torch, wholebatch as wb
    >>> wb.functional.multi_similarity_loss(torch.eye(3), torch.tensor([0, 0, 1]))
    tensor(0.4378)
    """
    data = agree_labeled(
        "multi_similarity_loss",
        Options(reduction=reduction, **options),
        (features, labels, weights, ignore_index),
        Checks.of(_check, reads=LISTED, alpha=alpha, beta=beta, base=base, epsilon=epsilon),
    ).widened()
    numbers = {"alpha": alpha, "beta": beta, "base": base, "epsilon": epsilon or 0.0}
    if epsilon is None:
        reductions = data.reductions("all", _TERMS, numbers)
    else:
        with torch.no_grad():
            limit_reductions = data.reductions("limits", _LIMITS, numbers)
            limits = {name: limit.to(data.facts.dtype) for name, limit in limit_reductions.items()}
        reductions = data.reductions("mined", _MINED, numbers, limits)
    losses = softplus(reductions["positives"]) / alpha + softplus(reductions["negatives"]) / beta
    return data.reduce(losses, data.rows.total)


def _check(alpha: float, beta: float, base: float, epsilon: float | None) -> None:
    for name, value in (("alpha", alpha), ("beta", beta)):
        if check_number(name, value) <= 0:
            raise ValueError(f"{name} must be positive, got {value}; it multiplies similarities")
    check_number("base", base)
    if epsilon is not None:
        check_number("epsilon", epsilon)


class MultiSimilarityLoss(ProductLoss, check=_check):
    """Multi-similarity over the global batch: the settings of :func:`wholebatch.functional.multi_similarity_loss`."""

    alpha: float = 2.0
    beta: float = 50.0
    base: float = 0.5
    epsilon: float | None = None
    ignore_index: int | None = None

    @entry
    def forward(self, features: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.multi_similarity_loss`: (b_r, d), (b_r,) -> L, the same on all ranks."""
        return multi_similarity_loss(features, labels, weights=weights, **self.settings)


DECLARATION = Declaration(multi_similarity_loss, MultiSimilarityLoss)
