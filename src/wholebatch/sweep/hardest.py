"""The hardest positive and the hardest negative of each row: a sweep that remembers two entries per row.

    n_i = argmax over negatives j of S_ij,        p_i = argmin over positives j of S_ij

Which pair is hardest is no differentiable question; a loss takes the rows that it names and differentiates that. So
there is no backward sweep: 1 unit of multiply-adds in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .driver import Block, Driver
from .pairs import Pairs

NOBODY = -1


class HardestSweep:
    """One pass over the blocks of S.

    Args:
        driver: of the rows.
        pairs: what is positive, what is excluded.

    Attributes:
        negatives: (b,), the column of each row's largest negative so far; NOBODY where it has none.
        positives: (b,), the column of its smallest positive.
        largest: (b,), those negatives.
        smallest: (b,), those positives.
    """

    def __init__(self, driver: Driver, pairs: Pairs) -> None:
        self.driver, self.pairs = driver, pairs
        x = driver.x
        self.negatives = torch.full((len(x),), NOBODY, dtype=torch.int64, device=x.device)
        self.positives = self.negatives.clone()
        self.largest = x.new_full((len(x),), float("-inf"), dtype=driver.dtype)
        self.smallest = self.largest.neg()

    def block(self, block: Block) -> None:
        """Take in a block."""
        for tile, x, y in self.driver.tiles(block):
            similar = self.driver.logits(tile, x, y)
            at = self.pairs.positive.within(tile, x.device)
            excluded = self.pairs.excluded.within(tile, x.device)
            rows, first = tile.rows, tile.cols.start
            if at is not None:
                far = self.driver.scratch(tile).fill_(float("inf"))
                far[at] = similar[at]
                smallest, where = far.min(1)
                nearer = smallest < self.smallest[rows]
                _take(self.smallest[rows], self.positives[rows], smallest, where + first, nearer)
                similar[at] = float("-inf")
            if excluded is not None:
                similar[excluded] = float("-inf")
            largest, where = similar.max(1)
            _take(self.largest[rows], self.negatives[rows], largest, where + first, largest > self.largest[rows])


def _take(best: Tensor, column: Tensor, new: Tensor, new_column: Tensor, better: Tensor) -> None:
    """Replace what is not as good."""
    best.copy_(torch.where(better, new, best))
    column.copy_(torch.where(better, new_column, column))
