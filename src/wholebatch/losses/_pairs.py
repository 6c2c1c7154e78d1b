"""The positive pairs of two towers: equal row numbers, and equal ids if given."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..partition import Diagonal
from ..sweep import Diagonals, EqualIds, Pairs

EqualIdsAre = Literal["positive", "excluded"]
EQUAL_IDS = ("positive", "excluded")


def pairs_of_rows(local: slice, ids: Tensor | None, equal_ids: EqualIdsAre) -> Pairs:
    """Return this rank's pairs (i, i) as positives, and other pairs of equal ids as positives or as excluded."""
    matching = Diagonals(Diagonal(0, local.start, local.stop - local.start))
    if ids is None:
        return Pairs(matching)
    if equal_ids == "positive":
        return Pairs(EqualIds(ids[local], ids))
    return Pairs(matching, excluded=EqualIds(ids[local], ids, but=matching))
