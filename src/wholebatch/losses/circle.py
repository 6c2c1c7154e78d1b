"""Circle loss: pairs weighed by how far they are from their optimum.

    L_i = log(1 + sum_{n in N(i)} exp f(c_in)  sum_{p in P(i)} exp g(c_ip))          c: cosines
    f(c) = gamma [c + m]_+ (c - m),    g(c) = -gamma [1 + m - c]_+ (c - 1 + m)

where the weights [.]_+ count as constants in the gradient. L_i is softplus of the sum of two logsumexps, over the
negatives and over the positives, of logits that are bent entry by entry: two sweeps. The exponents of positives reach
several hundred, which no one shift can hold: that sweep goes by each row's own maximum at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._checks import check_number, check_positive_number
from ..comm import Group
from ..contract import Checks, Options, Reduction, entry
from ..exchange import ExchangeName
from ..nodes import statistics_fields
from ..nodes.cross_entropy import softplus
from ..sweep import Memory
from ..sync import Sync
from ._labeled import agree_labeled
from ._module import SweepLoss


class _Negatives:
    """f, and gamma [c + m]_+ in the place of its derivative."""

    def __init__(self, gamma: float, m: float) -> None:
        self._gamma, self._m = gamma, m

    def transform_(self, logits: Tensor, _cols: slice) -> Tensor:
        weight = (logits + self._m).clamp_(min=0)
        return logits.sub_(self._m).mul_(weight).mul_(self._gamma)

    def slope_(self, logits: Tensor, _cols: slice) -> Tensor:
        return logits.add_(self._m).clamp_(min=0).mul_(self._gamma)


class _Positives:
    """g, and -gamma [1 + m - c]_+ in the place of its derivative."""

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
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
) -> Tensor:
    r"""Log of 1 + the negatives' times the positives' weighted exponentials of each row, among the rows of all ranks.

    L_i = log(1 + sum_{n in N(i)} exp f(c_in)  sum_{p in P(i)} exp g(c_ip)),
    f(c) = gamma [c + m]_+ (c - m),    g(c) = -gamma [1 + m - c]_+ (c - 1 + m),

    with the cosines c of all ranks' rows; P(i): the others with i's label, N(i): those with another. [.]_+ carries no
    gradient.

    L is the mean over the rows that have both; where no row has, L is 0.

    Args:
        features: Z_r, (b_r, d), this rank's rows, or (b_r, v, d) for v views of each example; they are normalized
            inside. b_r may differ between ranks and may be 0. float64, float32, bfloat16 or float16.
        labels: (b_r,) integers, the examples' classes.
        m: relaxation, which sets the optima of both and the margin between them.
        gamma: scale, > 0.
        weights: (b_r,), of the examples, or (b_r, v), >= 0; the mean is sum w_i L_i / sum w_i.
        reduction: "mean", "sum", or "none": L_i of this rank\'s rows, (b_r,) or
            (b_r, v), 0 where there is no positive or no negative; see :func:`wholebatch.functional.clip_loss`.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: "gather", "ring" or "auto", as there.
        memory: "flat", "auto" or bytes, as there.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.circle_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L, with the meaning of `sync` as in :func:`wholebatch.functional.clip_loss`.
    `backward` is called on every rank, with the same incoming gradient and in the same order as that of other losses;
    ranks that differ all raise ValueError.

    Work: 5 units of b_r B d multiply-adds per rank. Memory: as :func:`wholebatch.functional.nt_xent_loss`, and a
    third tile and a fourth. Collectives: as there, twice, and the positives' sums once more; one all-gather of labels.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.sup_con_loss`;
            also a gamma that is not positive.
        RuntimeError: if the gradient is differentiated again.

    Source: Sun et al., 2020, arXiv:2002.10857, equations 6 to 8.

    >>> import torch, wholebatch as wb
    >>> wb.functional.circle_loss(torch.eye(3), torch.tensor([0, 0, 1]))
    tensor(54.4000)
    """
    data = agree_labeled(
        "circle_loss",
        Options(group, sync, exchange, memory, reduction),
        (features, labels, weights),
        Checks(check=lambda: _check(m, gamma), must_match=("settings",)),
    ).widened()
    unit, fields = (1.0, 1.0), statistics_fields(target=False)
    of_negatives = data.numbers(unit, "negatives", fields, transform=_Negatives(gamma, m), bound=math.inf).logsumexp
    of_positives = data.numbers(unit, "positives", fields, transform=_Positives(gamma, m), bound=math.inf).logsumexp
    has_both = (data.positives > 0) & (data.negatives > 0)
    both = torch.where(has_both, of_negatives, 0.0) + torch.where(has_both, of_positives, 0.0)
    losses = torch.where(has_both, softplus(both), 0.0)
    return data.reduce(losses, data.anchors_with_negatives, has_both)


def _check(m: float, gamma: float) -> dict[str, object]:
    check_positive_number("gamma", gamma, "it multiplies similarities")
    if not -1 <= check_number("m", m) <= 1:
        raise ValueError(f"m must lie in [-1, 1], got {m}; similarities are to lie above 1 - m or below m")
    return {"settings": {"m": m, "gamma": gamma}}


class CircleLoss(SweepLoss):
    """Circle loss over the global batch.

    Args:
        m, gamma, reduction, group, sync, exchange, memory: as in
            :func:`wholebatch.functional.circle_loss`.
    """

    m: float = 0.4
    gamma: float = 80.0

    def check(self) -> None:
        """Raise ValueError unless the settings are valid."""
        super().check()
        _check(self.m, self.gamma)

    @entry
    def forward(self, features: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.circle_loss`: (b_r, d), (b_r,) -> L, the same on all ranks."""
        return circle_loss(features, labels, weights=weights, **self.settings)
