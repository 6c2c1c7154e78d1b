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
        self._seen_counts = torch.zeros(len(driver.x), dtype=torch.int64, device=driver.x.device)

    def similarities(self, block: Block, out: Tensor) -> None:
        """Write the similarities of the block's positives into their slots, (b, P)."""
        for tile, x, y in self.driver.tiles(block):
            similarities = self.driver.logits(tile, x, y)
            positives, slots = self._positives(tile)
            if positives is not None:
                out[tile.rows.start + positives[0], slots] = similarities[positives]

    def sums(self, block: Block, positive_similarities: Tensor, sums: Tensor) -> None:
        """Add the block's part of the sums of s (all_ip, positive_ip) and of s': `sums` is (4, b, P)."""
        for tile, x, y in self.driver.tiles(block):
            similarities = self.driver.logits(tile, x, y)
            positives, slots = self._positives(tile)
            excluded = self.pairs.excluded.within(tile, similarities.device)
            for slot in range(self.most):
                larger = self._larger(tile, similarities, positive_similarities, slot, excluded, positives, slots)
                # t s' = s (1 - s)
                slopes = torch.addcmul(larger, larger, larger, value=-1, out=self.driver.spare(tile))
                for i, numbers in enumerate((larger, slopes)):
                    sums[2 * i, tile.rows, slot] += numbers.sum(1)
                    if positives is not None:
                        sums[2 * i + 1, tile.rows, slot].index_add_(0, positives[0], numbers[positives].to(sums.dtype))

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
            positives, slots = self._positives(tile)
            excluded = self.pairs.excluded.within(tile, similarities.device)
            grad = self.driver.spare(tile, 1).zero_()
            for slot in range(self.most):
                larger = self._larger(tile, similarities, positive_similarities, slot, excluded, positives, slots)
                slopes = torch.addcmul(larger, larger, larger, value=-1, out=self.driver.spare(tile))
                grad.addcmul_(slopes, grad_all[tile.rows, slot].unsqueeze(1))
                if positives is not None:
                    grad[positives] += slopes[positives] * grad_positive[tile.rows, slot][positives[0]]
            if positives is not None:
                grad[positives] += grad_compared[tile.rows][positives[0], slots]
            self.driver.products(grad, tile, x, y, block, u, v)

    def _positives(self, tile: Tile) -> tuple[Index | None, Tensor]:
        """Return the tile's positives, and the number of each one's slot: its row's positives in order of the pass."""
        positives = self.pairs.positive.within(tile, self.driver.x.device)
        if positives is None:
            return None, self._seen_counts[:0]
        rows = positives[0]
        seen_counts = self._seen_counts[tile.rows]
        ordered = rows.argsort(stable=True)
        counts = torch.bincount(rows, minlength=len(seen_counts))
        first = counts.cumsum(0) - counts
        slots = torch.empty_like(rows)
        slots[ordered] = torch.arange(len(rows), device=rows.device) - first[rows[ordered]]
        slots += seen_counts[rows]
        seen_counts += counts
        return positives, slots

    def _larger(
        self,
        tile: Tile,
        similarities: Tensor,
        positive_similarities: Tensor,
        slot: int,
        excluded: Index | None,
        positives: Index | None,
        slots: Tensor,
    ) -> Tensor:
        """Return s(S_ij - S_ip) for the positive p in `slot`, 0 for a j that does not count; in the scratch tile."""
        compared = positive_similarities[tile.rows, slot].unsqueeze(1)
        larger = torch.sub(similarities, compared, out=self.driver.scratch(tile)).div_(self.temperature).sigmoid_()
        if excluded is not None:
            larger[excluded] = 0
        if positives is not None:
            itself = slots == slot
            larger[positives[0][itself], positives[1][itself]] = 0
        return larger
