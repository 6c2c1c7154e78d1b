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
from ..contract import entry
from ..pair_loss import PairLoss
from ..terms import Max, Min, unequal
from ._module import Recipe

_NEGATIVE = unequal("labels")


def _check(margin: float) -> None:
    check_weight("margin", margin, "it is a difference of squared distances")


class SemiHardTripletLoss(Recipe, check=_check):
    """The triplet loss of anchors and positives with the nearest negative beyond the positive.

    Args:
        margin: by which a negative should be farther than the positive, in squared distance, >= 0.

    >>> import torch, wholebatch as wb
    >>> anchors = torch.tensor([[0.0], [2.0]])
    >>> wb.recipes.SemiHardTripletLoss(margin=5.0)(anchors, anchors, torch.tensor([0, 1]))  # [0 - 4 + 5]_+
    tensor(1.)
    """

    margin: float = 0.2

    def _pair_loss(self, **options: Any) -> PairLoss:
        terms = {"semi_hard": Max(where=_beyond_positive), "farthest": Min(where=_NEGATIVE)}
        return PairLoss(terms, _hinge, similarity="neg_squared_distance", **options)

    @entry
    def forward(self, anchors: Tensor, positives: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            anchors: (b_r, d), as they are.
            positives: (b_r, d); row i has the label of anchor i.
            labels: (b_r,) integers; rows with another label are negatives. An anchor without any does not count.
            weights: (b_r,), one for each anchor, >= 0.
        """
        features, numbers = {"anchors": anchors, "positives": positives}, {"margin": self.margin}
        return self._compute(features, ids={"labels": labels}, numbers=numbers, weights=weights)


def _beyond_positive(x: Any, y: Any, s: Any) -> Tensor:  # fields and similarity
    beyond: Tensor = s < x.partner
    return beyond & _NEGATIVE(x, y)


def _hinge(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    some = ~r.farthest.isinf()
    chosen = torch.where(r.semi_hard.isinf(), r.farthest, r.semi_hard)
    loss = torch.relu(torch.where(some, chosen, 0.0) - x.partner + p.margin)
    return torch.where(some, loss, 0.0), some.to(loss.dtype)
