"""The sigmoid sweep: every entry is one term of the loss, so one pass computes loss and gradient.

With z_ij = 1 for a positive pair and -1 otherwise,

    l_ij = -log sigmoid(z_ij S_ij) = softplus(-z_ij S_ij),        d l_ij / d S_ij = -z_ij sigmoid(-z_ij S_ij)

so the gradient of a tile needs no sums of other tiles: 3 units of multiply-adds in the forward pass (1 if no gradient
is needed), none in the backward pass. Both functions are evaluated at m_ij = -z_ij S_ij, which is S_ij for negatives.
The logits of positives are negated before, and their gradients after. So no difference of near numbers is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..partition import Tile
from .driver import Block, Driver
from .pairs import Pairs


class SigmoidSweep:
    """Make one pass over the blocks of S.

    Args:
        driver: of the rows.
        pairs: positive and excluded entries.
        dtype: the dtype in which losses are summed.
        weights: (b,), weights of the rows in the gradient; None: 1.
    """

    def __init__(self, driver: Driver, pairs: Pairs, dtype: torch.dtype, weights: Tensor | None = None) -> None:
        self.driver, self.pairs = driver, pairs
        self._weights = None if weights is None else weights.to(driver.dtype).unsqueeze(1)
        self.losses = torch.zeros(len(driver.x), dtype=dtype, device=driver.x.device)  # sum_j l_ij of the blocks so far
        self.grad_bias = torch.zeros((), dtype=dtype, device=driver.x.device)  # sum_ij w_i d l_ij / d S_ij

    def block(self, block: Block, u: Tensor | None, v: Tensor | None, *, bias: bool) -> None:
        """Add a block's losses, dS Y to `u` (b, d), dS^T X to `v` (n, d), and with `bias` the sum of dS."""
        for tile, x, y in self.driver.tiles(block):
            m = self.driver.logits(tile, x, y)
            positives = self.pairs.positive.within(tile, m.device)
            excluded = self.pairs.excluded.within(tile, m.device)
            if positives is not None:
                m[positives] *= -1
            if excluded is not None:
                m[excluded] = float("-inf")
            self._add_softplus(m, tile)
            if u is None and v is None and not bias:
                continue
            grad = m.sigmoid_()
            if positives is not None:
                grad[positives] *= -1
            if self._weights is not None:
                grad.mul_(self._weights[tile.rows])
            if bias:
                self.grad_bias += grad.sum(1).sum(dtype=self.grad_bias.dtype)
            pairs = (positives, grad[positives]) if positives is not None and self.pairs.positive.few else None
            self.driver.products(grad, tile, x, y, block, u, v, pairs)

    def _add_softplus(self, m: Tensor, tile: Tile) -> None:
        """Add sum_j log(1 + exp(m)) = sum_j max(m, 0) + log(1 + exp(-|m|)) to the losses of the tile's rows."""
        scratch, losses = self.driver.scratch(tile), self.losses[tile.rows]
        losses += torch.clamp(m, min=0, out=scratch).sum(1)
        losses += torch.abs(m, out=scratch).neg_().exp_().log1p_().sum(1)
