"""The sigmoid sweep in kernels: a kernel sums losses and writes a tile of dS; two products add this to dX and dY."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .. import kernels
from .driver import Block, Driver
from .kernel_tiles import KernelTiles
from .pairs import Pairs
from .sigmoid import SigmoidSweep

_ALL = 1  # candidates: negatives and positives


class KernelSigmoidSweep(SigmoidSweep):
    """:class:`SigmoidSweep` in kernels; cases that kernels do not support use plain PyTorch.

    For float16 features no weight may be larger than `LARGEST`, and most should be near it, as in the softmax sweep.
    """

    def __init__(
        self,
        driver: Driver,
        pairs: Pairs,
        dtype: torch.dtype,
        columns: int,
        weights: Tensor | None = None,
    ) -> None:
        super().__init__(driver, pairs, dtype, weights)
        self._tiles = KernelTiles.of(driver, pairs, columns, candidates=_ALL, float16=weights is not None)
        self._row_weights = None if weights is None else weights.float().contiguous()

    def block(self, block: Block, u: Tensor | None, v: Tensor | None, *, bias: bool) -> None:
        tiles = self._tiles
        if tiles is None:
            super().block(block, u, v, bias=bias)
            return
        tiles.set_numbers(self.driver.bias)
        row_totals = torch.zeros_like(self.losses)  # sum_j w_i d l_ij / d S_ij
        for pairs in tiles.pairs(block):
            logits = pairs.logits().add_(tiles.scale_and_other[1])
            self.losses[pairs.rows].sub_(logsigmoid(logits))
            entries = torch.sigmoid(logits.neg_()).neg_()
            if self._row_weights is not None:
                entries.mul_(self._row_weights[pairs.rows])
            row_totals[pairs.rows].add_(entries)
            pairs.add_products_(entries, u, v)
        alone = u is None and v is None
        for tile, inputs in (tiles.of_sums if alone else tiles.of_gradients)(block):
            grad = None if alone else tiles.gradient(tile)
            weights = None if self._row_weights is None else self._row_weights[tile.rows]
            losses, totals = kernels.tile_sigmoid(inputs, grad, weights=weights, totals=bias)
            self.losses[tile.rows].add_(losses)
            if totals is not None:
                row_totals[tile.rows].add_(totals)
            if grad is not None:
                tiles.products(grad, tile, block, u, v)
        if bias:
            self.grad_bias += row_totals.sum()
