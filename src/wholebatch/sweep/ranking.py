"""The ranking sweep: a smooth count of the entries of a row that are larger than each of its positives.

With s(x) = sigmoid(x / t), for each positive p of row i

    all_ip      = sum over candidates j != p of s(S_ij - S_ip)
    positive_ip = the same over the other positives j

A row has few positives, at most P. Their similarities are kept, (b, P), and each tile is processed P times. The
derivative of all_ip by S_ij is s', and its derivative by S_ip is minus the sum of s' over j. The sums of s' are
accumulated with the sums of s. So the backward pass knows the whole gradient of a positive when it visits its tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..partition import Tile
from .driver import Block, Driver
from .pairs import Index, Pairs


class RankingSweep:
    """Pass over the blocks of S, in the same order each time.

    Args:
        driver: of the rows, with four tiles.
        pairs: positive and excluded entries.
        most: P, the most positives of a row.
        temperature: t.
    """

    def __init__(self, driver: Driver, pairs: Pairs, most: int, temperature: float) -> None:
        self.driver, self.pairs, self.most, self.temperature = driver, pairs, most, temperature
        self._seen = torch.zeros(len(driver.x), dtype=torch.int64, device=driver.x.device)

    def similarities(self, block: Block, out: Tensor) -> None:
        """Write the similarities of the block's positives into their slots, (b, P)."""
        for tile, x, y in self.driver.tiles(block):
            similarities = self.driver.logits(tile, x, y)
            at, slots = self._positives(tile)
            if at is not None:
                out[tile.rows.start + at[0], slots] = similarities[at]

    def sums(self, block: Block, positive_similarities: Tensor, sums: Tensor) -> None:
        """Add the block's part of the sums of s (all_ip, positive_ip) and of s': `sums` is (4, b, P)."""
        for tile, x, y in self.driver.tiles(block):
            similarities = self.driver.logits(tile, x, y)
            at, slots = self._positives(tile)
            excluded = self.pairs.excluded.within(tile, similarities.device)
            for slot in range(self.most):
                larger = self._larger(tile, similarities, positive_similarities, slot, excluded, at, slots)
                slopes = torch.addcmul(
                    larger, larger, larger, value=-1, out=self.driver.spare(tile)
                )  # t s' = s (1 - s)
                for which, numbers in enumerate((larger, slopes)):
                    sums[2 * which, tile.rows, slot] += numbers.sum(1)
                    if at is not None:
                        sums[2 * which + 1, tile.rows, slot].index_add_(0, at[0], numbers[at].to(sums.dtype))

    def gradients(
        self,
        block: Block,
        positive_similarities: Tensor,
        grad_all: Tensor,
        grad_positive: Tensor,
        grad_compared: Tensor,
        u: Tensor | None,
        v: Tensor | None,
    ) -> None:
        """Add dS Y to `u` and dS^T X to `v`.

        Args:
            block: of columns.
            positive_similarities: S_ip, (b, P).
            grad_all: a loss's derivatives by all_ip, divided by t, (b, P).
            grad_positive: its derivatives by positive_ip, divided by t, (b, P).
            grad_compared: its derivatives by S_ip as the similarity with which others are compared, (b, P).
            u: (b, d), None where not needed.
            v: (n, d), None where not needed.
        """
        for tile, x, y in self.driver.tiles(block):
            similarities = self.driver.logits(tile, x, y)
            at, slots = self._positives(tile)
            excluded = self.pairs.excluded.within(tile, similarities.device)
            grad = self.driver.spare(tile, 1).zero_()
            for slot in range(self.most):
                larger = self._larger(tile, similarities, positive_similarities, slot, excluded, at, slots)
                slopes = torch.addcmul(larger, larger, larger, value=-1, out=self.driver.spare(tile))
                grad.addcmul_(slopes, grad_all[tile.rows, slot].unsqueeze(1))
                if at is not None:
                    grad[at] += slopes[at] * grad_positive[tile.rows, slot][at[0]]
            if at is not None:
                grad[at] += grad_compared[tile.rows][at[0], slots]
            self.driver.products(grad, tile, x, y, block, u, v)

    def _positives(self, tile: Tile) -> tuple[Index | None, Tensor]:
        """Return the tile's positives, and the number of each one's slot: its row's positives in order of the pass."""
        at = self.pairs.positive.within(tile, self.driver.x.device)
        if at is None:
            return None, self._seen[:0]
        rows = at[0]
        seen = self._seen[tile.rows]
        ordered = rows.argsort(stable=True)
        counts = torch.bincount(rows, minlength=len(seen))
        first = counts.cumsum(0) - counts
        slots = torch.empty_like(rows)
        slots[ordered] = torch.arange(len(rows), device=rows.device) - first[rows[ordered]]
        slots += seen[rows]
        seen += counts
        return at, slots

    def _larger(
        self,
        tile: Tile,
        similarities: Tensor,
        positive_similarities: Tensor,
        slot: int,
        excluded: Index | None,
        at: Index | None,
        slots: Tensor,
    ) -> Tensor:
        """Return s(S_ij - S_ip) for the positive p in `slot`, 0 for a j that does not count; in the scratch tile."""
        compared = positive_similarities[tile.rows, slot].unsqueeze(1)
        larger = torch.sub(similarities, compared, out=self.driver.scratch(tile)).div_(self.temperature).sigmoid_()
        if excluded is not None:
            larger[excluded] = 0
        if at is not None:
            itself = slots == slot
            larger[at[0][itself], at[1][itself]] = 0
        return larger
