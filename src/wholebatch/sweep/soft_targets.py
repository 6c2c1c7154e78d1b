"""The soft-target sweep: the mean of a row of S under the softmax of the same row of another matrix.

    K_i = sum_j P_ij (S_ij - C_i),    P_ij = exp(T_ij - A_i),    A_i = logsumexp_j T_ij of a teacher's similarities T

and the same for columns with Q_ij = exp(T_ij - A'_j). A is known beforehand, so that no weight exceeds 1. C, the
logsumexps of S, is known as well, so that the terms of the sum are small. Then -K_i is a cross-entropy,

    L_i = C_i - sum_j P_ij S_ij,        dL_i / dS_ij = exp(S_ij - C_i) - P_ij

The difference of student and teacher is taken in the tile, before any sum: where they almost agree, no digits are lost.
Forward: 2 units of multiply-adds (S and T). Backward: the same, and 2 for the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..partition import Tile
from .driver import Block, Driver, relative

Sides = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class SoftTargetSweep:
    """Pass over the blocks of S and T; each row of Y carries the teacher's features after the student's.

    Args:
        driver: of the student's rows.
        teacher: driver of the teacher's rows, with tiles of the same side.
    """

    def __init__(self, driver: Driver, teacher: Driver) -> None:
        self.driver, self.teacher = driver, teacher

    def sums(self, block: Block, rows: tuple[Tensor, Tensor, Tensor], cols: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add the block's part to the sums of rows, (b, 3), and of columns, (n, 3), each given as (A, C, sums).

        The sums are K, sum_j exp(T_ij - A_i) and sum_j exp(S_ij - C_i). The last two are 1, up to rounding.
        """
        for tile, x, y in self.driver.tiles(block):
            logits = self.driver.logits(tile, x, y)
            block_cols = relative(tile.cols, block)
            targets = self._targets(tile, block)
            for (lse, near, sums), part, dim in ((rows, tile.rows, 1), (cols, block_cols, 0)):
                weights = torch.sub(targets, _part_as(lse, part, dim, targets), out=self.driver.scratch(tile)).exp_()
                away = torch.sub(logits, _part_as(near, part, dim, logits), out=self.teacher.scratch(tile))
                sums[part, 1].add_(weights.sum(dim))
                sums[part, 0].add_(weights.mul_(away).sum(dim))
                sums[part, 2].add_(away.exp_().sum(dim))

    def gradients(self, block: Block, rows: Sides, cols: Sides, u: Tensor | None, v: Tensor | None) -> None:
        """Add dS Y to `u` (b, d) and dS^T X to `v` (n, d), unless they are None.

        dS_ij = c_i exp(S_ij - C_i) - a_i exp(T_ij - A_i), plus the same of columns; a side is ((C, c), (A, a)).
        """
        for tile, x, y in self.driver.tiles(block):
            part = relative(tile.cols, block)
            logits = self.driver.logits(tile, x, y)
            targets = self._targets(tile, block)
            grad, scratch = self.driver.scratch(tile), self.teacher.scratch(tile)
            _weighted(logits, rows[0], tile.rows, 1, out=grad).sub_(
                _weighted(targets, rows[1], tile.rows, 1, out=scratch)
            )
            _weighted(logits, cols[0], part, 0, out=logits).sub_(_weighted(targets, cols[1], part, 0, out=targets))
            self.driver.products(grad.add_(logits), tile, x, y, block, u, v)

    def _targets(self, tile: Tile, block: Block) -> Tensor:
        """Return the tile of T."""
        y = block.y[relative(tile.cols, block), self.driver.width :].to(self.teacher.x.dtype)
        x_factor = self.teacher.factor("x", self.teacher.x[tile.rows])
        return self.teacher.logits(tile, x_factor, self.teacher.factor("y", y))


def _weighted(logits: Tensor, side: tuple[Tensor, Tensor], part: slice, dim: int, *, out: Tensor) -> Tensor:
    """Return exp(logits - lse) times a factor, with one pair (lse, factor) for each row (dim 1) or column (dim 0)."""
    lse, factor = (_part_as(numbers, part, dim, logits) for numbers in side)
    return torch.sub(logits, lse, out=out).exp_().mul_(factor)


def _part_as(numbers: Tensor, part: slice, dim: int, like: Tensor) -> Tensor:
    return numbers[part].to(like.dtype).unsqueeze(dim)
