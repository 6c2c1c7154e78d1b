"""The sigmoid sweep: every entry is a loss of its own, so one pass does all, gradient included.

With z_ij = 1 for a positive pair and -1 otherwise,

    l_ij = -log sigmoid(z_ij S_ij) = softplus(-z_ij S_ij),        d l_ij / d S_ij = -z_ij sigmoid(-z_ij S_ij)

so a tile needs no sums from elsewhere before its gradient is known: 3 units of multiply-adds in the forward pass (1
where no gradient is wanted), none in the backward. Both functions are evaluated on m_ij = -z_ij S_ij, which is S_ij but
for the positives: they are negated before and their gradient after, never taken as differences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .driver import Block, Driver
from .pairs import Pairs


class SigmoidSweep:
    """One pass over the blocks of S.

    Args:
        driver: of the rows.
        pairs: which entries are positive.
        dtype: in which losses are summed.
    """

    def __init__(self, driver: Driver, pairs: Pairs, dtype: torch.dtype) -> None:
        self.driver, self.pairs = driver, pairs
        self.loss = torch.zeros((), dtype=dtype, device=driver.x.device)  # sum_ij l_ij of the blocks so far
        self.grad_bias = torch.zeros_like(self.loss)  # sum_ij d l_ij / d S_ij

    def block(self, block: Block, u: Tensor | None, v: Tensor | None, *, bias: bool) -> None:
        """Take in a block; add dS Y to `u` (b, d), dS^T X to `v` (n, d), and sum dS for the bias if asked to."""
        for tile, x, y in self.driver.tiles(block):
            m = self.driver.logits(tile, x, y)
            at = self.pairs.positives(tile, m.device)
            if at is not None:
                m[at] *= -1
            self.loss += self._softplus(m, self.driver.scratch(tile))
            if u is None and v is None and not bias:
                continue
            grad = m.sigmoid_()
            if at is not None:
                grad[at] *= -1
            if bias:
                self.grad_bias += self._total(grad)
            self.driver.products(grad, tile, x, y, block, u, v)

    def _softplus(self, m: Tensor, scratch: Tensor) -> Tensor:
        """sum log(1 + exp(m)) = sum max(m, 0) + log(1 + exp(-|m|))."""
        positive_part = self._total(torch.clamp(m, min=0, out=scratch))
        return positive_part + self._total(torch.abs(m, out=scratch).neg_().exp_().log1p_())

    def _total(self, tile: Tensor) -> Tensor:
        """Its sum; row by row first, since a sum in a wider dtype would copy the tile."""
        return tile.sum(1).sum(dtype=self.loss.dtype)
