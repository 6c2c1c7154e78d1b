"""The nested sweep in kernels: one computes the sums of all parts of a tile, one writes the factors of the features.

X and Y may have been widened to float32 from half precision. They are then multiplied in half precision, which is exact
and faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from ..partition import Tile
from .driver import Block, Driver, relative
from .kernel_tiles import KernelTiles
from .nested import NestedSweep
from .pairs import Pairs


class KernelNestedSweep(NestedSweep):
    """:class:`NestedSweep` in kernels; cases that kernels do not support use plain PyTorch.

    Of `columns` there are so many in the global batch; `dtype` is that of the features before they were widened.
    """

    def __init__(
        self,
        driver: Driver,
        pairs: Pairs,
        dims: Sequence[int],
        inverse_norms: Tensor,
        scale: float,
        shift: float,
        columns: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(driver, pairs, dims, inverse_norms, scale, shift)
        narrow = Driver(driver.x.to(dtype), driver.scale, side=driver.side, products=driver.precision)
        entry = len(dims) * dtype.itemsize, (len(dims) + 3) * driver.dtype.itemsize
        self._tiles = KernelTiles.of(narrow, pairs, columns, bytes_of_an_entry=entry, apart=False)
        self._ends = kernels.Ends.of(self.dims, driver.x.device)

    def sums(self, block: Block, rows: Tensor, targets: Tensor, cols: Tensor | None) -> None:
        if self._tiles is None:
            super().sums(block, rows, targets, cols)
            return
        self._tiles.set_numbers(self.shift)
        for tile, inputs in self._tiles.of_sums(block):
            block_cols = relative(tile.cols, block)
            by_row, target_sums, by_col = kernels.nested_sums(self._nested(tile, inputs, block), cols=cols is not None)
            rows[tile.rows].add_(by_row.T)
            targets[tile.rows].add_(target_sums.T)
            if cols is not None and by_col is not None:
                cols[block_cols].add_(by_col.T)

    def gradients(
        self,
        block: Block,
        rows: Tensor,
        targets: Tensor,
        cols: Tensor | None,
        u: Tensor | None,
        v: Tensor | None,
        row_sums: Tensor,
        col_sums: Tensor | None,
    ) -> None:
        if self._tiles is None:
            super().gradients(block, rows, targets, cols, u, v, row_sums, col_sums)
            return
        self._tiles.set_numbers(self.shift)
        precision = self.driver.precision
        for tile, inputs in self._tiles.of_gradients(block):
            block_cols, grads = relative(tile.cols, block), self._tiles.gradient(tile, len(self.dims))
            weights = kernels.NestedWeights(
                _transpose(rows[tile.rows]),
                _transpose(targets[tile.rows]),
                None if cols is None else _transpose(cols[block_cols]),
            )
            rows_totals, cols_totals = kernels.nested_gradient(
                self._nested(tile, inputs, block),
                grads,
                weights,
                totals_of_cols=col_sums is not None,
            )
            row_sums[tile.rows].add_(rows_totals.T)
            if col_sums is not None and cols_totals is not None:
                col_sums[block_cols].add_(cols_totals.T)
            for grad, features in zip(grads, self._parts, strict=True):
                if u is not None:
                    precision.multiply((grad,), (inputs.y[:, features],), u[tile.rows, features], add=True)
                if v is not None:
                    precision.multiply((grad.T,), (inputs.x[:, features],), v[block_cols, features], add=True)

    def _nested(self, tile: Tile, inputs: kernels.TileInputs, block: Block) -> kernels.NestedTile:
        col_scales = self._inverse(block)[relative(tile.cols, block)]
        return kernels.NestedTile(inputs, self._ends, _transpose(self._rows[tile.rows]), _transpose(col_scales))


def _transpose(x: Tensor) -> Tensor:
    """Transpose (n, parts) to (parts, n), float32."""
    return x.T.float().contiguous()
