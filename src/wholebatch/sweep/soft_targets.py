"""The soft-target sweep: the mean of a row of S under the softmax of the same row of another matrix.

    K_i = sum_j P_ij (S_ij - C_i),    P_ij = exp(T_ij - A_i),    A_i = logsumexp_j T_ij of a teacher's similarities T

and the same for columns with Q_ij = exp(T_ij - A'_j). The A are known beforehand, so that no weight exceeds 1; so are
the C, near S, so that what is summed is small. With a loss's derivatives k_i and k'_j, dS_ij = k_i P_ij + k'_j Q_ij.
Forward 2 units of multiply-adds (S and T), backward 1 for T and 2 for the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .driver import Block, Driver, relative


class SoftTargetSweep:
    """Passes over the blocks of S and T; Y's rows carry the teacher's behind their own.

    Args:
        driver: of the student's rows.
        teacher: of the teacher's rows, with tiles of the same side.
    """

    def __init__(self, driver: Driver, teacher: Driver) -> None:
        self.driver, self.teacher = driver, teacher

    def sums(self, block: Block, rows: tuple[Tensor, Tensor, Tensor], cols: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add the block's part to K of the rows (b,) and of the columns (n,), each given as (A, C, K)."""
        of_teacher = self._of_teacher(block)
        for tile, x, y in self.driver.tiles(block):
            logits = self.driver.logits(tile, x, y)
            here = relative(tile.cols, block)
            targets = self.teacher.logits(tile, self.teacher.x[tile.rows], of_teacher[here])
            for (lse, near, into), at, dim in ((rows, tile.rows, 1), (cols, here, 0)):
                weights = torch.sub(targets, _at(lse, at, dim, targets), out=self.driver.scratch(tile)).exp_()
                away = torch.sub(logits, _at(near, at, dim, logits), out=self.teacher.scratch(tile))
                into[at] += weights.mul_(away).sum(dim)

    def gradients(
        self, block: Block, rows: tuple[Tensor, Tensor], cols: tuple[Tensor, Tensor], u: Tensor | None, v: Tensor | None
    ) -> None:
        """Add dS Y to `u` (b, d) and dS^T X to `v` (n, d), from (A, k) of rows and columns; None is left out."""
        of_teacher = self._of_teacher(block)
        for tile, x, y in self.driver.tiles(block):
            here = relative(tile.cols, block)
            targets = self.teacher.logits(tile, self.teacher.x[tile.rows], of_teacher[here])
            grad = torch.sub(targets, _at(rows[0], tile.rows, 1, targets), out=self.driver.buffer(tile))
            grad.exp_().mul_(_at(rows[1], tile.rows, 1, targets))
            targets.sub_(_at(cols[0], here, 0, targets)).exp_()
            self.driver.products(grad.addcmul_(targets, _at(cols[1], here, 0, targets)), tile, x, y, block, u, v)

    def _of_teacher(self, block: Block) -> Tensor:
        return block.y[:, self.driver.width :].to(self.teacher.dtype)


def _at(numbers: Tensor, at: slice, dim: int, like: Tensor) -> Tensor:
    return numbers[at].to(like.dtype).unsqueeze(dim)
