"""The softmax sweep in kernels: tiles of S that stay on the chip, and tiles of dS in the features' precision.

    forward     a kernel computes a tile's sums: 1 unit of multiply-adds, and nothing of S in memory
    backward    a kernel computes it again and writes a tile of dS; two products add it to dX and dY

Nothing of S is kept: computing it twice is faster than reading it. Rows and columns to be normalized are multiplied
without normalization, and the products are divided by their norms: S_ij = scale x_i . y_j / (|x_i| |y_j|), and with
G_ij = dS_ij / (|x_i| |y_j|),

    U_i = |x_i| sum_j G_ij y_j,        V_j = |y_j| sum_i G_ij x_i

With `leaves_divided`, U is left divided by |x_i|, for a caller who divides by it in any case.

For float16 features the caller scales the weights so that no entry of dS exceeds `LARGEST`: float16 has little room
above, and loses entries that are a million times smaller.

Cases that kernels do not support (a transform of logits, a guide, a shift for each row and column, statistics) use
plain PyTorch. Positive pairs on diagonals are computed apart, in float32, and add their terms once for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import kernels
from ..partition import Tile
from .driver import Block, Driver, relative
from .kernel_tiles import KernelTiles, NamedPairs
from .selection import Selection
from .sides import Sums, Weights, one_shift
from .softmax import SoftmaxSweep

_CANDIDATES = {"negatives": 0, "all": 1, "positives": 2}


class KernelSoftmaxSweep(SoftmaxSweep):
    """:class:`SoftmaxSweep` in kernels, for the sums in `fields`.

    Either kernels compute both sums and gradients, or plain PyTorch does: both must use the same exponentials.

    The shift of sums should be one that :func:`kernels.exact` returns.
    """

    fields = frozenset({"sum", "target", "logits", "count"})

    def __init__(self, driver: Driver, selection: Selection, columns: int, *, leaves_divided: bool = False) -> None:
        super().__init__(driver, selection)
        self._leaves_divided = leaves_divided
        self._tiles = self._supported(columns)
        self.difference: Tensor | None = None  # the largest, between sums by rows and by columns, relative to them

    def sums(self, block: Block, rows: Sums | None, cols: Sums | None) -> None:
        shift, tiles = one_shift(rows, cols), self._tiles
        assert all(self.fields >= {*side.fields} for side in (rows, cols) if side is not None)
        if shift is None or tiles is None:
            super().sums(block, rows, cols)
            return
        tiles.set_numbers(shift)
        row_sums, col_sums = ({} if side is None else side.fields for side in (rows, cols))
        for pairs in tiles.pairs(block):
            terms = self._terms(pairs, tiles)
            for fields, part in ((row_sums, pairs.rows), ({} if block.triangle else col_sums, pairs.cols)):
                for name in fields.keys() & terms.keys():
                    fields[name][part].add_(terms[name])
        apart = tiles.diagonals is not None
        row_names, col_names = ({*fields} - {"target"} if apart else fields.keys() for fields in (row_sums, col_sums))
        for tile, inputs in self._in_kernels(tiles.of_sums, block):
            names = () if tile.self_transposed else col_names
            by_row, by_col = kernels.tile_sums(inputs, rows=row_names, cols=names)
            if "sum" in by_row and "sum" in by_col:
                new = relative_difference(by_row["sum"].sum(), by_col["sum"].sum(), tile.shape[0] * tile.shape[1])
                self.difference = new if self.difference is None else torch.maximum(self.difference, new)
            for fields, part, totals in ((row_sums, tile.rows, by_row), (col_sums, relative(tile.cols, block), by_col)):
                for name, new in totals.items():
                    fields[name][part].add_(new)

    def gradients(
        self,
        block: Block,
        rows: Weights | None,
        cols: Weights | None,
        u: Tensor | None,
        v: Tensor | None,
        offset_grads: Tensor | None = None,
    ) -> None:
        shift, tiles = one_shift(rows, cols), self._tiles
        if shift is None or tiles is None:
            super().gradients(block, rows, cols, u, v, offset_grads)
            return
        tiles.set_numbers(shift)
        self.divided = self._leaves_divided and self.driver.norms is not None
        normed = list(self._normed(block, u, v))
        for product, norms in normed:
            product.div_(norms)
        row_weights, col_weights = ({} if side is None else side.named() for side in (rows, cols))
        for pairs in tiles.pairs(block):
            terms = {} if self.selection.over == "negatives" else self._terms(pairs, tiles)
            entries: Tensor | None = None
            for side, part in ((row_weights, pairs.rows), (col_weights, pairs.cols)):
                for name in (name for name in side if name == "target" or name in terms):
                    term = side[name][part] * terms[name] if name == "sum" else side[name][part]
                    entries = term if entries is None else entries + term
            if entries is None:
                continue
            if offset_grads is not None:
                offset_grads[pairs.rows].add_(entries)
            pairs.add_products_(entries, u, None if block.triangle else v)
        apart = tiles.diagonals is not None
        row_weights, col_weights = (
            {name: weights.float().contiguous() for name, weights in side.items() if name != "target" or not apart}
            for side in (row_weights, col_weights)
        )
        for tile, inputs in self._in_kernels(tiles.of_gradients, block):
            grad, part = tiles.gradient(tile), relative(tile.cols, block)
            totals = kernels.tile_gradient(
                inputs,
                grad,
                rows={name: weights[tile.rows] for name, weights in row_weights.items()},
                cols={name: weights[part] for name, weights in col_weights.items()},
                totals=offset_grads is not None,
            )
            if offset_grads is not None and totals is not None:
                offset_grads[tile.rows].add_(totals)
            tiles.products(grad, tile, block, u, v)
        for product, norms in normed:
            product.mul_(norms)

    def _terms(self, pairs: NamedPairs, tiles: KernelTiles) -> dict[str, Tensor]:
        """Return the terms of positive pairs, which do not enter a kernel, in the sums of their rows and columns."""
        logits = pairs.logits()
        if self.selection.over == "negatives":
            return {"target": logits}
        exponentials = torch.sub(logits, tiles.scale_and_other[1]).exp_()
        return {"target": logits, "sum": exponentials, "logits": logits, "count": torch.ones_like(logits)}

    def _in_kernels(
        self, tiles: Callable[[Block], Iterator[tuple[Tile, kernels.TileInputs]]], block: Block
    ) -> Iterator[tuple[Tile, kernels.TileInputs]]:
        """Return the block's tiles; none if all candidates are positive pairs that do not enter a kernel."""
        assert self._tiles is not None
        alone = self._tiles.diagonals is not None and self.selection.over == "positives"
        return iter(()) if alone else tiles(block)

    def _normed(self, block: Block, u: Tensor | None, v: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the products whose rows are multiplied by norms afterward, and these norms."""
        if u is not None and self.driver.norms is not None and not self.divided:
            yield u[block.rows], self.driver.norms[block.rows]
        is_same = u is not None and v is not None and u[block.rows].data_ptr() == v.data_ptr()  # of a symmetric S
        if v is not None and self.driver.col_norms is not None and not is_same:
            yield v, self.driver.col_norms[block.cols]

    def _supported(self, columns: int) -> KernelTiles | None:
        """Return the tiles for kernels, or None if kernels do not support the selection."""
        selection = self.selection
        unsupported = (selection.ceiling, selection.guide, selection.transform)
        if any(option is not None for option in unsupported) or selection.best_of > 1:
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
