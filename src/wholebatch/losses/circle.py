"""Circle loss: pairs weighted by their distance from their optimum.

    L_i = log(1 + sum_{n in N(i)} exp f(c_in)  sum_{p in P(i)} exp g(c_ip))          c: cosines
    f(c) = gamma [c + m]_+ (c - m),    g(c) = -gamma [1 + m - c]_+ (c - 1 + m)

where the weights [.]_+ are constants in the gradient. L_i is the softplus of the sum of two logsumexps, one over the
negatives and one over the positives: terms of a declared loss, which one sweep computes. The exponents of positives
reach several hundred, and each row's sums are relative to its largest one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_number, check_positive_number
from ..contract import Checks, Options, ProductOptions, Reduction, entry
from ..logsumexp import softplus
from ..terms import LogSumExp, unequal
from ._declaration import Declaration
from ._labeled import LISTED, agree_labeled, same_class
from ._module import ProductLoss


def _negative(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    """Return f."""
    logit: Tensor = _slope_of_negative(s, x, y, p).detach() * (s - p.m)
    return logit


def _slope_of_negative(s: Any, x: Any, y: Any, p: Any) -> Tensor:
    slope: Tensor = p.gamma * (s + p.m).clamp(min=0)
    return slope


def _positive(s: Any, x: Any, y: Any, p: Any) -> Tensor:
    """Return g."""
    logit: Tensor = _slope_of_positive(s, x, y, p).detach() * (s - (1 - p.m))
    return logit


def _slope_of_positive(s: Any, x: Any, y: Any, p: Any) -> Tensor:
    slope: Tensor = -p.gamma * (1 + p.m - s).clamp(min=0)
    return slope


_TERMS = {
    "negatives": LogSumExp(_negative, unequal("label"), slope=_slope_of_negative),
    "positives": LogSumExp(_positive, same_class, slope=_slope_of_positive),
}


@entry
def circle_loss(
    features: Tensor,
    labels: Tensor,
    *,
    m: float = 0.4,
    gamma: float = 80.0,
    ignore_index: int | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[ProductOptions],
) -> Tensor:
    r"""Return circle loss of the rows of all ranks: a softplus of each row's weighted negatives and positives.

    L_i = log(1 + sum_{n in N(i)} exp f(c_in)  sum_{p in P(i)} exp g(c_ip)),
    f(c) = gamma [c + m]_+ (c - m),    g(c) = -gamma [1 + m - c]_+ (c - 1 + m),

    with the cosines c of all ranks' rows; P(i): the others with i's label, N(i): those with another. [.]_+ carries no
    gradient. L is the mean over the rows that have both a positive and a negative, and 0 if there is no such row.

    Args:
        features: Z_r, (b_r, d), this rank's rows, or (b_r, v, d) for v views of each example; they are normalized
            inside. b_r may differ between ranks and may be 0. float64, float32, bfloat16 or float16.
        labels: (b_r,) integers >= 0, the class of each example.
        ignore_index: a label whose rows are left out, as in :func:`wholebatch.functional.sup_con_loss`.
        m: relaxation, in [-1, 1]: positives should lie above 1 - m, negatives below m.
        gamma: scale of the similarities, > 0.
        weights: (b_r,), one for each example, or (b_r, v), >= 0; the mean is sum w_i L_i / sum w_i.
        reduction: "mean", "sum", or "none": L_i of this rank's rows, (b_r,) or (b_r, v), 0 without a positive or
            without a negative; see :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.ProductOptions`.

    Returns:
        L, the same on every rank: `wholebatch.reference.circle_loss` of the whole batch, at least in float32.

    Collectives: those of :class:`wholebatch.PairLoss`, and two all-gathers of labels. Work: 2 units of b_r B d
    multiply-adds per rank. Memory: that of :func:`wholebatch.functional.nt_xent_loss` and four tiles more.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.sup_con_loss`;
            also for a gamma that is not positive and an m outside [-1, 1].
        RuntimeError: if the gradient is differentiated again.

    Source: Sun et al., 2020, arXiv:2002.10857, equations 6 to 8.

    >>> import torch, wholebatch as wb
    >>> wb.functional.circle_loss(torch.eye(3), torch.tensor([0, 0, 1]))
    tensor(54.4000)
    """
    data = agree_labeled(
        "circle_loss",
        Options(reduction=reduction, **options),
        (features, labels, weights, ignore_index),
        Checks.of(_check, reads=LISTED, m=m, gamma=gamma),
    ).widened()
    reductions = data.reductions("circle", _TERMS, {"m": m, "gamma": gamma})
    negatives, positives = reductions["negatives"], reductions["positives"]
    has_both = (data.positives > 0) & (data.negatives > 0)
    losses = softplus((negatives + positives).masked_fill(~has_both, 0.0)).masked_fill(~has_both, 0.0)
    return data.reduce(losses, data.anchors_with_negatives, has_both)


def _check(m: float, gamma: float) -> None:
    check_positive_number("gamma", gamma, "it multiplies similarities")
    if not -1 <= check_number("m", m) <= 1:
        raise ValueError(f"m must lie in [-1, 1], got {m}; positives should lie above 1 - m, negatives below m")


class CircleLoss(ProductLoss, check=_check):
    """Circle loss over the global batch: the settings of :func:`wholebatch.functional.circle_loss`."""

    m: float = 0.4
    gamma: float = 80.0
    ignore_index: int | None = None

    @entry
    def forward(self, features: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.circle_loss`: (b_r, d), (b_r,) -> L, the same on all ranks."""
        return circle_loss(features, labels, weights=weights, **self.settings)


DECLARATION = Declaration(circle_loss, CircleLoss)
