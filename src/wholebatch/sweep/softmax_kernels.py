"""The softmax sweep in kernels: tiles of S that stay on the chip, and tiles of dS in the features' precision.

    forward     a kernel gives a tile's sums: 1 unit of multiply-adds, and nothing of S in memory
    backward    a kernel writes a tile of dS, in bfloat16 if X is (rows that are normalised inside are float32); two
                products add it to dX and dY, in float32

Tiles are larger than those of plain PyTorch, which has two in float32: the memory of both goes to the one of dS. What a
kernel does not know (a bend, a guide, exponentials that are kept, a shift for each row) is left to plain PyTorch. The
two terms of a positive's dS are added in float32 here.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..partition import Tile, tiles
from .driver import Block, Driver, relative
from .members import Members, members
from .memory import KeptTiles
from .softmax import Selection, SoftmaxSweep, Sums, Weights, one_shift

_CANDIDATES = {"negatives": 0, "all": 1, "positives": 2}
_TILES = 2 * torch.float32.itemsize  # bytes for each entry of a tile of plain PyTorch's


class KernelSoftmaxSweep(SoftmaxSweep):
    """As :class:`SoftmaxSweep`, of numbers that are in `fields`.

    Sums and gradients are both made by kernels or both by plain PyTorch, for their exponentials have to be the same.
    """

    fields = frozenset({"sum", "target"})

    def __init__(self, driver: Driver, selection: Selection, *, kept: KeptTiles | None = None) -> None:
        super().__init__(driver, selection, kept=kept)
        self._sets = self._known_sets()
        self._side = isqrt(driver.side**2 * _TILES // driver.x.dtype.itemsize)
        self._written: Tensor | None = None

    def sums(self, block: Block, rows: Sums | None, cols: Sums | None) -> None:
        shift = one_shift(rows, cols)
        assert all(self.fields >= {*side.fields} for side in (rows, cols) if side is not None)
        if shift is None or self._sets is None:
            super().sums(block, rows, cols)
            return
        for tile in tiles(block.rows, block.cols, self._side, triangle=block.triangle):
            of_rows = None if rows is None else rows[tile.rows]
            of_cols = None if cols is None or tile.own_mirror else cols[relative(tile.cols, block)]
            x, y, settings = self._tile(tile, block, *self._sets)
            made = kernels.tile_sums(
                x,
                y,
                shift=shift,
                rows=of_rows is not None,
                cols=of_cols is not None,
                row_targets=of_rows is not None and "target" in of_rows.fields,
                col_targets=of_cols is not None and "target" in of_cols.fields,
                **settings,
            )
            for side, of_side, targets in (
                (of_rows, made.rows, made.row_targets),
                (of_cols, made.cols, made.col_targets),
            ):
                for name, new in (("sum", of_side), ("target", targets)):
                    if side is not None and new is not None:
                        side.fields[name].add_(new)

    def gradients(
        self,
        block: Block,
        rows: Weights | None,
        cols: Weights | None,
        u: Tensor | None,
        v: Tensor | None,
        of_offsets: Tensor | None = None,
    ) -> None:
        shift = one_shift(rows, cols)
        assert all(side.of_logits is None for side in (rows, cols) if side is not None)
        if shift is None or self._sets is None:
            super().gradients(block, rows, cols, u, v, of_offsets)
            return
        for tile in tiles(block.rows, block.cols, self._side, triangle=block.triangle):
            of_rows = None if rows is None else rows[tile.rows]
            of_cols = None if cols is None else cols[relative(tile.cols, block)]
            x, y, settings = self._tile(tile, block, *self._sets)
            grad = self._gradient_buffer(tile)
            kernels.tile_gradient(
                x,
                y,
                grad,
                shift=shift,
                row_weights=None if of_rows is None else of_rows.of_exponentials,
                col_weights=None if of_cols is None else of_cols.of_exponentials,
                row_targets=None if of_rows is None else of_rows.of_targets,
                col_targets=None if of_cols is None else of_cols.of_targets,
                **settings,
            )
            if u is not None:
                _add_product_(u[tile.rows], grad, y)
            if v is not None and not tile.own_mirror:
                _add_product_(v[relative(tile.cols, block)], grad.T, x)

    def _known_sets(self) -> tuple[Members, Members] | None:
        """Positive and excluded entries; None if a kernel does not know what is asked, whichever way is gone."""
        selection, driver = self.selection, self.driver
        plain = (selection.floor, selection.ceiling, selection.guide, selection.bend, selection.offsets)
        if (
            any(of is not None for of in plain)
            or selection.best_of > 1
            or self.kept is not None
            or driver.norms is not None
            or driver.bias != 0
            or driver.x.dtype not in (torch.float32, torch.bfloat16)  # dS may be too large for float16
        ):
            return None
        positive, excluded = members(selection.pairs.positive), members(selection.pairs.excluded)
        return None if positive is None or excluded is None else (positive, excluded)

    def _tile(
        self, tile: Tile, block: Block, positive: Members, excluded: Members
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Rows of X and of Y, and what both kernels take."""
        driver = self.driver
        x, y = driver.x[tile.rows], block.y[relative(tile.cols, block), : driver.width]
        nothing = x.new_empty(0, dtype=torch.int32)
        return (
            x if x.stride(1) == 1 else x.contiguous(),
            y if y.stride(1) == 1 else y.contiguous(),
            {
                "scale": driver.scale,
                "positive": positive.of_tile(tile, nothing),
                "excluded": excluded.of_tile(tile, nothing),
                "candidates": _CANDIDATES[self.selection.over],
            },
        )

    def _gradient_buffer(self, tile: Tile) -> Tensor:
        rows, cols = tile.shape
        if self._written is None or self._written.numel() < rows * cols:
            self._written = self.driver.x.new_empty(rows * cols)
        return self._written[: rows * cols].view(rows, cols)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed in the precision of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
