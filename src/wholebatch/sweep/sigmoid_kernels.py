"""The sigmoid sweep in kernels: a kernel sums losses and writes a tile of dS; two products add this to dX and dY."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..partition import Tile
from .driver import Block, Driver
from .kernel_tiles import KernelTiles
from .pairs import Index, Pairs
from .sigmoid import SigmoidSweep


class KernelSigmoidSweep(SigmoidSweep):
    """:class:`SigmoidSweep` in kernels; cases that kernels do not support use plain PyTorch.

    For float16 features no weight may be larger than `LARGEST`, and most should be near it, as in the softmax sweep.
    """

    def __init__(
        self, driver: Driver, pairs: Pairs, dtype: torch.dtype, columns: int, weights: Tensor | None = None
    ) -> None:
        super().__init__(driver, pairs, dtype, weights)
        self._tiles = KernelTiles.of(driver, pairs, columns, float16=weights is not None)

    def block(self, block: Block, u: Tensor | None, v: Tensor | None, *, bias: bool) -> None:
        if self._tiles is None:
            super().block(block, u, v, bias=bias)
            return
        alone = u is None and v is None
        for tile, inputs in (self._tiles.of_sums if alone else self._tiles.of_gradients)(block):
            grad = None if alone else self._tiles.gradient(tile)
            losses, totals = kernels.tile_sigmoid(
                inputs,
                grad,
                bias=self.driver.bias,
                weights=None if self._weights is None else self._weights[tile.rows, 0],
                totals=bias,
            )
            self.losses[tile.rows] += losses
            if totals is not None:
                self.grad_bias += totals.sum()
            if grad is None:
                continue
            if (apart := self._tiles.apart(tile)) is not None:
                self._tiles.add_apart(apart, self._pair_gradient(apart, tile, inputs), tile, inputs, block, u, v)
                grad[apart] = 0.0
            self._tiles.products(grad, tile, inputs, block, u, v)

    def _pair_gradient(self, at: Index, tile: Tile, of: kernels.TileInputs) -> Tensor:
        """Return dS of positive pairs, (k,), from their products in float32."""
        products = torch.linalg.vecdot(of.x[at[0]].float(), of.y[at[1]].float())
        entries = torch.sigmoid(products.mul_(-of.scale).sub_(self.driver.bias)).neg_()
        return entries if self._weights is None else entries.mul_(self._weights[tile.rows, 0][at[0]])
