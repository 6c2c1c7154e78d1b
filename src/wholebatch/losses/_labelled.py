"""Examples with labels, against themselves: those of the same class are positives, the others negatives.

    Z = rows of all ranks,    S = scale Z Z^T without its diagonal

S is symmetric: the tiles above its diagonal say all, and the work is half of a full sweep's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..partition import Diagonal
from ..sweep import Bend, Diagonals, EqualIds, Over, Pairs, Selection
from ._cross_entropy import how_many_equal
from ._door import Agreement
from ._softmax import Numbers, softmax_numbers
from ._towers import Towers

UNIT = 1.001  # no norm is larger, after division and rounding


def flattened(features: Any, labels: Any) -> tuple[Any, Any]:
    """(b, v, d) features of v views each, with b labels, as (b v, d) and b v labels; others as they are."""
    if isinstance(features, Tensor) and features.dim() == 3:
        if isinstance(labels, Tensor) and labels.dim() == 1:
            labels = labels.repeat_interleave(features.shape[1])
        features = features.flatten(0, 1)
    return features, labels


class Labelled:
    """The "features" and "labels" that ranks agreed on, and who is whose positive. Collective: 1 all-gather of ids."""

    def __init__(self, agreed: Agreement) -> None:
        self.agreed, self.rows = agreed, agreed.rows["features"]
        own = self.rows.rows(agreed.rank)
        self.labels = agreed.ids("labels")
        self.own_labels = self.labels[own]
        itself = Diagonals(Diagonal(0, own.start, own.stop - own.start))
        self.pairs = Pairs(EqualIds(self.own_labels, self.labels, but=itself), itself)

    @property
    def positives(self) -> Tensor:
        """How many each of this rank's rows has, (b,)."""
        return how_many_equal(self.own_labels, self.labels) - 1

    @property
    def negatives(self) -> Tensor:
        """How many each of this rank's rows has, (b,)."""
        return self.rows.total - 1 - self.positives

    @property
    def anchors(self) -> int:
        """How many rows of all ranks have a positive."""
        return int((how_many_equal(self.labels, self.labels) > 1).sum())

    @property
    def anchors_with_negatives(self) -> int:
        """How many rows of all ranks have a positive and a negative."""
        same = how_many_equal(self.labels, self.labels)
        return int(((same > 1) & (same < self.rows.total)).sum())

    def numbers(
        self,
        scale: tuple[float, Any],
        over: Over,
        fields: tuple[str, ...],
        *,
        floor: Tensor | None = None,
        bend: Bend | None = None,
        bound: float = UNIT**2,
    ) -> Numbers:
        """Of this rank's rows, normalised. A floor belongs to rows: with one, all of S is computed."""
        z, symmetric = self.agreed.inputs["features"], floor is None
        rows, cols = softmax_numbers(
            self.agreed,
            scale,
            [z] if symmetric else [torch.nn.functional.normalize(z.to(self.agreed.dtype), dim=1)] * 2,
            towers=Towers(stays=(0,), normalise=True) if symmetric else Towers(stays=(0,), travels=(1,)),
            stays=self.rows,
            travels=self.rows,
            selection=Selection(self.pairs, over, floor=floor, bend=bend),
            bound=bound,
            rows=() if symmetric else fields,
            cols=fields if symmetric else (),
            symmetric=symmetric,
        )
        numbers = cols if symmetric else rows
        assert numbers is not None
        return numbers
