"""The driver of all sweeps: it computes tiles of S = scale X Y^T + bias, and products of their gradients with X and Y.

    logits      S_ij = scale x_i . y_j + bias                1 unit of multiply-adds
    products    U_i += dS_ij y_j,  V_j += dS_ij x_i          2 units       (U = dS Y, V = dS^T X)

A sweep, such as `softmax` or `sigmoid`, turns a tile of S into a tile of dS. A buffer is allocated once, at its first
use. Rows of X and Y are rounded or widened tile by tile to the factors that `products` multiplies.

If dS is rounded to half precision, its entries of positive pairs are multiplied apart, in float32. They are as large as
all others of their row together, and so are their rounding errors: without them dX is several times more exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.precision import accumulation_dtype
from ..partition import Tile, tiles
from .pairs import Index
from .products import Factor, Products, rows_of, transposed


@dataclass(frozen=True)
class Block:
    """Columns of the global batch that are on this rank now, and the local rows to multiply them with."""

    y: Tensor  # (n, d), or wider: only the first d numbers of a row are part of S
    cols: slice  # their place among all columns
    rows: slice
    triangle: bool = False  # whether the columns are the local rows of a symmetric S, so that its upper half suffices


class Driver:
    """Compute tiles of X's rows with one block of columns after another.

    Args:
        x: (b, d), the rows.
        scale, bias: of S.
        side: rows and columns of a tile.
        largest: rows and columns of the largest block, which may be smaller than a tile; None: unknown.
        norms: (b, 1), divisors of X's rows, applied tile by tile; None: no division.
        col_norms: (B, 1), divisors of Y's rows, for all columns; None: no division.
        products: the precision of the products.
        index: (b,), the rows of `x` that are X's rows, read tile by tile; None: all of them.

    Attributes:
        count: b.
    """

    def __init__(
        self,
        x: Tensor,
        scale: float | Tensor,
        bias: float | Tensor = 0.0,
        *,
        side: int,
        largest: tuple[int, int] | None = None,
        norms: Tensor | None = None,
        col_norms: Tensor | None = None,
        products: Products | None = None,
        index: Tensor | None = None,
    ) -> None:
        self.x, self.scale, self.bias, self.side, self.norms, self.col_norms = x, scale, bias, side, norms, col_norms
        self.index, self.count = index, len(x) if index is None else len(index)
        self.dtype, self.width, self.precision = accumulation_dtype(x.dtype), x.shape[1], products or Products()
        rows, cols = (min(side, n) for n in largest or (side, side))
        self._entries, self._tiles = rows * cols, dict[int | str, Tensor]()
        self._factors, self._side_rows = dict[str, Factor](), {"x": rows, "y": cols}

    def tiles(self, block: Block) -> Iterator[tuple[Tile, Factor, Factor]]:
        """Yield each tile with its rows of X and of Y, as factors of products."""
        rows: slice | None = None
        x: Factor = ()
        for tile in tiles(block.rows, block.cols, self.side, triangle=block.triangle):
            if tile.rows != rows:
                rows, x = tile.rows, self.factor("x", self.rows(tile.rows), self.norms, tile.rows)
            y = block.y[relative(tile.cols, block), : self.width]
            yield tile, x, self.factor("y", y, self.col_norms, tile.cols)

    def factors(self, tile: Tile, block: Block, start: int = 0) -> tuple[Factor, Factor]:
        """Return a tile's rows of X and of Y; those of Y from column `start` of the block on."""
        y = block.y[relative(tile.cols, block), start : start + self.width]
        return self.factor("x", self.rows(tile.rows)), self.factor("y", y)

    def rows(self, part: slice) -> Tensor:
        """Return some of X's rows."""
        return self.x[part] if self.index is None else self.x.index_select(0, self.index[part])

    def factor(self, tower: str, x: Tensor, norms: Tensor | None = None, span: slice = slice(0)) -> Factor:
        """Return rows of "x" or "y" as a factor, divided by their norms."""
        if norms is None and not self.precision.rounds(x):
            return (x,)
        if tower not in self._factors:
            rows, dtypes = self._side_rows[tower], self.precision.dtypes(x.dtype if norms is None else self.dtype)
            self._factors[tower] = tuple(x.new_empty(rows, self.width, dtype=dtype) for dtype in dtypes)
        parts = [part[: len(x)] for part in self._factors[tower]]
        if norms is not None and len(parts) == 1:
            if x.device.type == "cpu" and parts[0].dtype == self.dtype != x.dtype:  # which would divide a copy
                x = parts[0].copy_(x)
            return self.precision.rounded_(torch.div(x, norms[span], out=parts[0]))
        if norms is not None:
            x = x / norms[span]
        elif len(parts) > 1:
            x = x.to(self.dtype, copy=True)
        return self.precision.split(x, parts)

    def logits(self, tile: Tile, x: Factor, y: Factor) -> Tensor:
        """Return the tile of S, in a buffer that the next tile overwrites."""
        logits = self.precision.scaled(self.scale, x, transposed(y), self.buffer(tile))
        if tile.self_transposed:  # a product may round S_ij and S_ji differently
            below = torch.triu(logits, 1, out=self.scratch(tile)).T
            logits.triu_().add_(below)
        return logits.add_(self.bias) if isinstance(self.bias, Tensor) or self.bias else logits

    def buffer(self, tile: Tile) -> Tensor:
        """Return the memory of the tile of S."""
        return self._memory(0, tile)

    def scratch(self, tile: Tile) -> Tensor:
        """Return memory for a second tile."""
        return self._memory(1, tile)

    def spare(self, tile: Tile, number: int = 0) -> Tensor:
        """Return memory for a further tile, by its number."""
        return self._memory(2 + number, tile)

    def _memory(self, number: int | str, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
        if number not in self._tiles:
            self._tiles[number] = self.x.new_empty(self._entries, dtype=dtype or self.dtype)
        rows, cols = tile.shape
        return self._tiles[number][: rows * cols].view(rows, cols)

    def gradient(self, tile: Tile) -> Tensor:
        """Return memory for a tile of dS, in the precision in which it is multiplied if that is a single part."""
        if self.precision.rounds_gradients:
            return self._memory("hi", tile, self.precision.gradient_dtype)
        return self.buffer(tile)

    def products(
        self,
        grad: Tensor,
        tile: Tile,
        x: Factor,
        y: Factor,
        block: Block,
        u: Tensor | None,
        v: Tensor | None,
        pairs: tuple[Index, Tensor] | None = None,
    ) -> None:
        """Add the tile of dS times its rows of Y to `u`, (b, d), and its transpose times X to `v`, (n, d).

        `grad` is in the accumulation dtype, or that of `gradient`, and may lose its values. `pairs` are entries of dS
        that replace those of `grad`, with their index; they are multiplied apart if `grad` is rounded.
        """
        u = None if u is None else u[tile.rows]
        v = None if v is None or tile.self_transposed else v[relative(tile.cols, block)]
        if pairs is not None:
            index, entries = pairs
            apart = self.precision.rounds_gradients
            grad[index] = 0.0 if apart else entries.to(grad.dtype)
            if apart:
                add_pairs_(index, entries, x, y, u, v)
        factor = self.gradient_factor(grad, tile)
        if u is not None:
            self.precision.multiply(factor, self.precision.beside_gradient(y), u, add=True)
        if v is not None:
            self.precision.multiply(transposed(factor), self.precision.beside_gradient(x), v, add=True)

    def gradient_factor(self, grad: Tensor, tile: Tile) -> Factor:
        """Return a tile of dS as a factor."""
        if not self.precision.rounds(grad) or grad.dtype == self.precision.gradient_dtype:
            return (grad,)
        single = self.precision.gradient_dtype
        dtypes = self.precision.dtypes(grad.dtype) if single is None else (single,)
        into = [self._memory(name, tile, dtype) for name, dtype in zip(("hi", "lo"), dtypes, strict=False)]
        return self.precision.split(grad, into)


def add_pairs_(index: Index, entries: Tensor, x: Factor, y: Factor, u: Tensor | None, v: Tensor | None) -> None:
    """Add dS Y to `u`, and dS^T X to `v`, for a few entries of dS, (k,), in the precision of `u` and `v`."""
    rows, cols = index
    for product, into, other, factor in ((u, rows, cols, y), (v, cols, rows, x)):
        if product is not None:
            product.index_add_(0, into, rows_of(factor, other, product.dtype) * entries.to(product.dtype).unsqueeze(1))


def relative(cols: slice, block: Block) -> slice:
    """Return columns of the global batch as columns of the block."""
    return slice(cols.start - block.cols.start, cols.stop - block.cols.start)
