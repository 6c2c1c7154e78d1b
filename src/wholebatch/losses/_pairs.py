"""What rows with equal ids are to each other."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..partition import Diagonal
from ..sweep import Diagonals, EqualIds, Pairs

EqualIdsAre = Literal["positive", "excluded"]
EQUAL_IDS = ("positive", "excluded")


def pairs_of_rows(local: slice, ids: Tensor | None, equal_ids: EqualIdsAre) -> Pairs:
    """Row i of one tower belongs to row i of the other; and to others with its id, or those do not count.

    Args:
        local: this rank's rows among all.
        ids: of all ranks' rows, or None.
        equal_ids: "positive" or "excluded".
    """
    matching = Diagonals(Diagonal(0, local.start, local.stop - local.start))
    if ids is None:
        return Pairs(matching)
    if equal_ids == "positive":
        return Pairs(EqualIds(ids[local], ids))
    return Pairs(matching, excluded=EqualIds(ids[local], ids, but=matching))
