"""Triplets of an anchor, its positive and a semi-hard negative: one that is farther than the positive, but not far.

    n(i) = the nearest negative with |a_i - n|^2 > |a_i - p_i|^2;  if there is none, the farthest negative
    L = mean over i of [ |a_i - p_i|^2 - |a_i - n(i)|^2 + margin ]_+

Nearer negatives than the positive, the hard ones, collapse a model that has just begun to learn.

Source: Schroff et al., 2015, arXiv:1503.03832; the fallback is TensorFlow Addons'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.settings import check_weight
from ..pair_loss import PairLoss
from ..terms import Max, Min


def semi_hard_triplet(*, margin: float = 0.2, **options: Any) -> PairLoss:  # of PairLoss
    """Return the triplet loss of anchors and positives with the nearest negative beyond the positive.

    Args:
        margin: by which a negative should be farther than the positive, in squared distance, >= 0.
        **options: group, sync, exchange, memory, reduction, precision of :class:`wholebatch.PairLoss`.

    Returns:
        A loss of (anchors, positives) with `label`, integers, in `x_data` and `y_data`: row i of the positives has the
        label of row i of the anchors, and rows with another label are negatives. An anchor without does not count.

    Raises:
        ValueError: for a negative margin.

    >>> import torch, wholebatch as wb
    >>> anchors, label = torch.tensor([[0.0], [2.0]]), {"label": torch.tensor([0, 1])}
    >>> wb.recipes.semi_hard_triplet(margin=5.0)(anchors, anchors, x_data=label, y_data=label)  # [0 - 4 + 5]_+
    tensor(1.)
    """
    margin = check_weight("margin", margin, "it is a difference of squared distances")
    return PairLoss(
        {"semi_hard": Max(where=_beyond_positive), "farthest": Min(where=_negative)},
        _hinge,
        similarity="neg_squared_distance",
        parameters={"margin": margin},
        **options,
    )


def _negative(x: Any, y: Any) -> Tensor:  # fields
    negative: Tensor = x.label != y.label
    return negative


def _beyond_positive(x: Any, y: Any, s: Any) -> Tensor:  # fields and similarity
    beyond: Tensor = s < x.partner
    return beyond & _negative(x, y)


def _hinge(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    some = ~r.farthest.isinf()
    chosen = torch.where(r.semi_hard.isinf(), r.farthest, r.semi_hard)
    loss = torch.relu(torch.where(some, chosen, 0.0) - x.partner + p.margin)
    return torch.where(some, loss, 0.0), some.to(loss.dtype)
