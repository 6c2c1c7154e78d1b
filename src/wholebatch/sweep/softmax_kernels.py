"""The softmax sweep in kernels: tiles of S that stay on the chip, and tiles of dS in the features' precision.

    forward     a kernel computes a tile's sums: 1 unit of multiply-adds, and nothing of S in memory
    backward    a kernel writes a tile of dS; two products add it to dX and dY

If exp(S) is kept, the first kernel writes it and the second reads it. Rows and columns to be normalized are multiplied
without normalization, and the products are divided by their norms: S_ij = scale x_i . y_j / (|x_i| |y_j|), and with
G_ij = dS_ij / (|x_i| |y_j|),

    U_i = |x_i| sum_j G_ij y_j,        V_j = |y_j| sum_i G_ij x_i

For float16 features the caller scales the weights so that no entry of dS exceeds `LARGEST`: float16 has little room
above, and loses entries that are a million times smaller.

Cases that kernels do not support (a transform of logits, a guide, a shift for each row and column, statistics) use
plain PyTorch. The two terms of a positive's dS are added in float32 here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import kernels
from .driver import Block, Driver, relative
from .kernel_tiles import KernelTiles
from .memory import KeptTiles
from .selection import Selection
from .sides import Sums, Weights, one_shift
from .softmax import SoftmaxSweep

_CANDIDATES = {"negatives": 0, "all": 1, "positives": 2}


class KernelSoftmaxSweep(SoftmaxSweep):
    """:class:`SoftmaxSweep` in kernels, for the sums in `fields`.

    Either kernels compute both sums and gradients, or plain PyTorch does: both must use the same exponentials.
    """

    fields = frozenset({"sum", "target", "logits", "count"})

    def __init__(self, driver: Driver, selection: Selection, columns: int, *, kept: KeptTiles | None = None) -> None:
        super().__init__(driver, selection, kept=kept)
        self._tiles = self._supported(columns)
        self.difference: Tensor | None = None  # the largest, between sums by rows and by columns, relative to them

    def sums(self, block: Block, rows: Sums | None, cols: Sums | None) -> None:
        shift = one_shift(rows, cols)
        assert all(self.fields >= {*side.fields} for side in (rows, cols) if side is not None)
        if shift is None or self._tiles is None:
            super().sums(block, rows, cols)
            return
        tiles = self._tiles.of_sums if self.kept is None else self._tiles.of_gradients  # kept in the same order
        for tile, inputs in tiles(block):
            sides = [
                rows and rows[tile.rows],
                None if tile.self_transposed else cols and cols[relative(tile.cols, block)],
            ]
            names = [() if side is None else side.fields.keys() for side in sides]
            keep = None if self.kept is None else self.kept.next(tile.shape)
            made = kernels.tile_sums(inputs, shift=shift, rows=names[0], cols=names[1], keep=keep)
            if all("sum" in of_side for of_side in made):
                by_rows, by_cols = (of_side["sum"].sum() for of_side in made)
                self._note(relative_difference(by_rows, by_cols, tile.shape[0] * tile.shape[1]))
            for side, of_side in zip(sides, made, strict=True):
                for name, new in of_side.items():
                    assert side is not None
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
        if shift is None or self._tiles is None:
            super().gradients(block, rows, cols, u, v, of_offsets)
            return
        normed = list(self._normed(block, u, v))
        for product, norms in normed:
            product.div_(norms)
        for tile, inputs in self._tiles.of_gradients(block):
            sides = [rows and rows[tile.rows], cols and cols[relative(tile.cols, block)]]
            grad, kept = self._tiles.gradient(tile), None if self.kept is None else self.kept.next(tile.shape)
            apart = None
            if self.selection.over == "negatives" and of_offsets is None:
                apart = self._tiles.apart(tile)
            of_rows, of_cols = ({} if side is None else side.named() for side in sides)
            if apart is not None:
                entries = self._pair_gradient(
                    grad, apart, [(s, dim) for s, dim in zip(sides, (1, 0), strict=True) if s]
                )
                self._tiles.add_apart(apart, entries, tile, inputs, block, u, v)
                for of in (of_rows, of_cols):
                    of.pop("target", None)
            totals = kernels.tile_gradient(
                inputs, grad, shift=shift, rows=of_rows, cols=of_cols, kept=kept, totals=of_offsets is not None
            )
            if of_offsets is not None and totals is not None:
                of_offsets[tile.rows] += totals
            self._tiles.products(grad, tile, inputs, block, u, v)
        for product, norms in normed:
            product.mul_(norms)

    def _note(self, difference: Tensor) -> None:
        self.difference = difference if self.difference is None else torch.maximum(self.difference, difference)

    def _normed(self, block: Block, u: Tensor | None, v: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the products whose rows are multiplied by norms afterward, and these norms."""
        if u is not None and self.driver.norms is not None:
            yield u[block.rows], self.driver.norms[block.rows]
        is_same = u is not None and v is not None and u[block.rows].data_ptr() == v.data_ptr()  # of a symmetric S
        if v is not None and self.driver.col_norms is not None and not is_same:
            yield v, self.driver.col_norms[block.cols]

    def _supported(self, columns: int) -> KernelTiles | None:
        """Return the tiles for kernels, or None if kernels do not support the selection."""
        selection = self.selection
        unsupported = (selection.floor, selection.ceiling, selection.guide, selection.transform)
        if any(of is not None for of in unsupported) or selection.best_of > 1:
            return None
        return KernelTiles.of(
            self.driver,
            selection.pairs,
            columns,
            candidates=_CANDIDATES[selection.over],
            offsets=selection.offsets,
            float16=True,
        )


def relative_difference(by_rows: Tensor, by_cols: Tensor, entries: int) -> Tensor:
    """Return |a - b| / a, (), of two sums of the same exponentials in float32.

    A GPU may count an exponential below the smallest normal number t as 0 in one sum and not in the other. So two right
    sums differ by up to `entries` t, which counts as nothing: a is taken as 2^20 times as much at least.
    """
    least = 2.0**20 * entries * torch.finfo(torch.float32).tiny
    return (by_rows - by_cols).abs() / by_rows.clamp(min=least)
