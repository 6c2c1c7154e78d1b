"""Circle loss: pairs weighted by their distance from their optimum.

    L_i = log(1 + sum_{n in N(i)} exp f(c_in)  sum_{p in P(i)} exp g(c_ip))          c: cosines
    f(c) = gamma [c + m]_+ (c - m),    g(c) = -gamma [1 + m - c]_+ (c - 1 + m)

where the weights [.]_+ are constants in the gradient. L_i is the softplus of the sum of two logsumexps, one over the
negatives and one over the positives, of logits that are transformed entry by entry: two sweeps. The exponents of
positives reach several hundred, where one shift underflows, so these sweeps use each row's maximum from the start.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_number, check_positive_number
from ..contract import Checks, Options, ProductOptions, Reduction, entry
from ..nodes import statistics_fields
from ..nodes.cross_entropy import softplus
from ._declaration import Declaration
from ._labeled import LISTED, agree_labeled
from ._module import ProductLoss


class _Negatives:
    """The function f, with gamma [c + m]_+ as its derivative."""

    def __init__(self, gamma: float, m: float) -> None:
        self._gamma, self._m = gamma, m

    def transform_(self, logits: Tensor, _cols: slice) -> Tensor:
        weight = (logits + self._m).clamp_(min=0)
        return logits.sub_(self._m).mul_(weight).mul_(self._gamma)

    def slope_(self, logits: Tensor, _cols: slice) -> Tensor:
        return logits.add_(self._m).clamp_(min=0).mul_(self._gamma)


class _Positives:
    """The function g, with -gamma [1 + m - c]_+ as its derivative."""

    def __init__(self, gamma: float, m: float) -> None:
        self._gamma, self._m = gamma, m

    def transform_(self, logits: Tensor, _cols: slice) -> Tensor:
        weight = (1 + self._m - logits).clamp_(min=0)
        return logits.sub_(1 - self._m).mul_(weight).mul_(-self._gamma)

    def slope_(self, logits: Tensor, _cols: slice) -> Tensor:
        return logits.neg_().add_(1 + self._m).clamp_(min=0).mul_(-self._gamma)


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

    Collectives: twice those of :func:`wholebatch.functional.nt_xent_loss`, the positives' sums once more, and one
    all-gather of labels. Work: 5 units of b_r B d multiply-adds per rank. Memory: that of
    :func:`wholebatch.functional.nt_xent_loss` and two tiles more.

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
    unit, fields = (1.0, 1.0), statistics_fields(target=False)
    of_negatives = data.statistics(unit, "negatives", fields, transform=_Negatives(gamma, m), bound=math.inf).logsumexp
    of_positives = data.statistics(unit, "positives", fields, transform=_Positives(gamma, m), bound=math.inf).logsumexp
    has_both = (data.positives > 0) & (data.negatives > 0)
    both = torch.where(has_both, of_negatives, 0.0) + torch.where(has_both, of_positives, 0.0)
    losses = torch.where(has_both, softplus(both), 0.0)
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
