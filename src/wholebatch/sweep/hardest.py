"""The sweep that finds the hardest positive and the hardest negative of each row, and keeps these two entries.

    n_i = argmax over negatives j of S_ij,        p_i = argmin over positives j of S_ij

The choice of the hardest pair is not differentiable. A loss fetches the rows of these pairs and differentiates their
similarities, so there is no backward sweep: 1 unit of multiply-adds in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .driver import Block, Driver
from .pairs import Pairs

NOBODY = -1


class HardestSweep:
    """Make one pass over the blocks of S.

    Attributes:
        negatives: (b,), the column of each row's largest negative so far; NOBODY for a row without negatives.
        positives: (b,), the column of each row's smallest positive so far; NOBODY for a row without positives.
        largest: (b,), the similarities of these negatives.
        smallest: (b,), the similarities of these positives.
    """

    def __init__(self, driver: Driver, pairs: Pairs) -> None:
        self.driver, self.pairs = driver, pairs
        x = driver.x
        self.negatives = torch.full((len(x),), NOBODY, dtype=torch.int64, device=x.device)
        self.positives = self.negatives.clone()
        self.largest = x.new_full((len(x),), float("-inf"), dtype=driver.dtype)
        self.smallest = self.largest.neg()

    def block(self, block: Block) -> None:
        """Update the hardest pairs with those of a block."""
        for tile, x, y in self.driver.tiles(block):
            similarities = self.driver.logits(tile, x, y)
            positives = self.pairs.positive.within(tile, similarities.device)
            excluded = self.pairs.excluded.within(tile, similarities.device)
            rows, first = tile.rows, tile.cols.start
            if positives is not None:
                far = self.driver.scratch(tile).fill_(float("inf"))
                far[positives] = similarities[positives]
                smallest, where = far.min(1)
                nearer = smallest < self.smallest[rows]
                _take(self.smallest[rows], self.positives[rows], smallest, where + first, nearer)
                similarities[positives] = float("-inf")
            if excluded is not None:
                similarities[excluded] = float("-inf")
            largest, where = similarities.max(1)
            _take(self.largest[rows], self.negatives[rows], largest, where + first, largest > self.largest[rows])


def _take(best: Tensor, column: Tensor, new: Tensor, new_column: Tensor, better: Tensor) -> None:
    """Replace the entries for which a better one was found, in place."""
    best.copy_(torch.where(better, new, best))
    column.copy_(torch.where(better, new_column, column))
