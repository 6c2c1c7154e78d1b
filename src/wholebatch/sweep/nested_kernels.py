"""The nested sweep in kernels: one gives all parts' sums of a tile, one writes what each part's features meet.

Where X and Y are float32 that was half precision, they are multiplied as that: nothing is lost, and it is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from .driver import Block, Driver, relative
from .kernel_tiles import KernelTiles, add_product_
from .nested import NestedSweep
from .pairs import Pairs


class KernelNestedSweep(NestedSweep):
    """As :class:`NestedSweep`; what kernels do not know is left to plain PyTorch.

    Args:
        driver, pairs, dims, inverse_norms, scale, shift: as there.
        columns: how many the global batch has.
        dtype: that the features had.
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
        narrow = Driver(driver.x.to(dtype), driver.scale, side=driver.side)
        entry = len(dims) * dtype.itemsize, (len(dims) + 3) * driver.dtype.itemsize
        self._tiles = KernelTiles.of(narrow, pairs, columns, bytes_of_an_entry=entry)
        self._ends = kernels.Ends.of(self.dims, driver.x.device)

    def sums(self, block: Block, rows: Tensor, targets: Tensor, cols: Tensor | None) -> None:
        if self._tiles is None:
            super().sums(block, rows, targets, cols)
            return
        for tile, of_tile in self._tiles(block):
            here = relative(tile.cols, block)
            of_rows, of_targets, of_cols = kernels.nested_sums(
                of_tile,
                self._ends,
                _by_part(self._rows[tile.rows]),
                _by_part(self._inverse(block)[here]),
                shift=self.shift,
                cols=cols is not None,
            )
            rows[tile.rows] += of_rows.T
            targets[tile.rows] += of_targets.T
            if cols is not None and of_cols is not None:
                cols[here] += of_cols.T

    def gradients(
        self,
        block: Block,
        rows: Tensor,
        targets: Tensor,
        cols: Tensor | None,
        u: Tensor | None,
        v: Tensor | None,
        of_rows: Tensor,
        of_cols: Tensor | None,
    ) -> None:
        if self._tiles is None:
            super().gradients(block, rows, targets, cols, u, v, of_rows, of_cols)
            return
        for tile, of_tile in self._tiles(block):
            here, grads = relative(tile.cols, block), self._tiles.gradient(tile, len(self.dims))
            rows_totals, cols_totals = kernels.nested_gradient(
                of_tile,
                grads,
                self._ends,
                _by_part(self._rows[tile.rows]),
                _by_part(self._inverse(block)[here]),
                shift=self.shift,
                rows=_by_part(rows[tile.rows]),
                targets=_by_part(targets[tile.rows]),
                cols=None if cols is None else _by_part(cols[here]),
                totals_of_cols=of_cols is not None,
            )
            of_rows[tile.rows] += rows_totals.T
            if of_cols is not None and cols_totals is not None:
                of_cols[here] += cols_totals.T
            for grad, features in zip(grads, self._parts, strict=True):
                if u is not None:
                    add_product_(u[tile.rows, features], grad, of_tile.y[:, features])
                if v is not None:
                    add_product_(v[here, features], grad.T, of_tile.x[:, features])


def _by_part(x: Tensor) -> Tensor:
    """(n, parts) as (parts, n), float32."""
    return x.T.float().contiguous()
