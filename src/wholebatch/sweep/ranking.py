"""The ranking sweep: how many of a row's entries are, softly, larger than each of its positives.

With s(x) = sigmoid(x / t), for each positive p of row i

    all_ip      = sum over candidates j != p of s(S_ij - S_ip)
    positive_ip = the same over the other positives j

A row has few positives: their similarities are kept, (b, P), and each tile is passed over once for each of P. The
derivative by S_ij of the sum is s', that by S_ip less the sum of s' over j: collected beside the sums, so that a
positive's whole gradient is known when the backward pass comes by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..partition import Tile
from .driver import Block, Driver
from .pairs import Index, Pairs


class RankingSweep:
    """Passes over the blocks of S, in the same order each time.

    Args:
        driver: of the rows, with four tiles.
        pairs: what is positive, what is excluded.
        most: P, the most positives of a row.
        temperature: t.
    """

    def __init__(self, driver: Driver, pairs: Pairs, most: int, temperature: float) -> None:
        self.driver, self.pairs, self.most, self.temperature = driver, pairs, most, temperature
        self._seen = torch.zeros(len(driver.x), dtype=torch.int64, device=driver.x.device)

    def similarities(self, block: Block, into: Tensor) -> None:
        """Write the similarities of the block's positives into their slots, (b, P)."""
        for tile, x, y in self.driver.tiles(block):
            similar = self.driver.logits(tile, x, y)
            at, slots = self._positives(tile)
            if at is not None:
                into[tile.rows.start + at[0], slots] = similar[at]

    def sums(self, block: Block, of_positives: Tensor, into: Tensor) -> None:
        """Add the block's part of all_ip, positive_ip, and their derivatives' sums: `into` is (4, b, P)."""
        for tile, x, y in self.driver.tiles(block):
            similar = self.driver.logits(tile, x, y)
            at, slots = self._positives(tile)
            excluded = self.pairs.excluded.within(tile, x.device)
            for slot in range(self.most):
                larger = self._larger(tile, similar, of_positives, slot, excluded, at, slots)
                slopes = torch.addcmul(
                    larger, larger, larger, value=-1, out=self.driver.spare(tile)
                )  # t s' = s (1 - s)
                for which, numbers in enumerate((larger, slopes)):
                    into[2 * which, tile.rows, slot] += numbers.sum(1)
                    if at is not None:
                        into[2 * which + 1, tile.rows, slot].index_add_(0, at[0], numbers[at].to(into.dtype))

    def gradients(
        self,
        block: Block,
        of_positives: Tensor,
        all_: Tensor,
        positive: Tensor,
        local: Tensor,
        u: Tensor | None,
        v: Tensor | None,
    ) -> None:
        """Add dS Y to `u` and dS^T X to `v`.

        Args:
            block: of columns.
            of_positives: S_ip, (b, P).
            all_: a loss's derivatives by all_ip, over t, (b, P).
            positive: by positive_ip, over t.
            local: by S_ip, as what others are compared with.
            u: (b, d), None where not needed.
            v: (n, d), None where not needed.
        """
        for tile, x, y in self.driver.tiles(block):
            similar = self.driver.logits(tile, x, y)
            at, slots = self._positives(tile)
            excluded = self.pairs.excluded.within(tile, x.device)
            grad = self.driver.spare(tile, 1).zero_()
            for slot in range(self.most):
                larger = self._larger(tile, similar, of_positives, slot, excluded, at, slots)
                slopes = torch.addcmul(larger, larger, larger, value=-1, out=self.driver.spare(tile))
                grad.addcmul_(slopes, all_[tile.rows, slot].unsqueeze(1))
                if at is not None:
                    grad[at] += slopes[at] * positive[tile.rows, slot][at[0]]
            if at is not None:
                grad[at] += local[tile.rows][at[0], slots]
            self.driver.products(grad, tile, x, y, block, u, v)

    def _positives(self, tile: Tile) -> tuple[Index | None, Tensor]:
        """The tile's positives, and which of their row's each is, in the order of the pass."""
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
        similar: Tensor,
        of_positives: Tensor,
        slot: int,
        excluded: Index | None,
        at: Index | None,
        slots: Tensor,
    ) -> Tensor:
        """s(S_ij - S_ip) of the tile for the positive in `slot`, 0 where j does not count; in the scratch tile."""
        compared = of_positives[tile.rows, slot].unsqueeze(1)
        larger = torch.sub(similar, compared, out=self.driver.scratch(tile)).div_(self.temperature).sigmoid_()
        if excluded is not None:
            larger[excluded] = 0
        if at is not None:
            itself = slots == slot
            larger[at[0][itself], at[1][itself]] = 0
        return larger
