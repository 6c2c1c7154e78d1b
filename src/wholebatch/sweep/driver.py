"""The driver of all sweeps: it computes tiles of S = scale X Y^T + bias, and products of their gradients with X and Y.

    logits      S_ij = scale x_i . y_j + bias                1 unit of multiply-adds
    products    U_i += dS_ij y_j,  V_j += dS_ij x_i          2 units       (U = dS Y, V = dS^T X)

A sweep, such as `softmax` or `sigmoid`, turns a tile of S into a tile of dS. A buffer is allocated once, at its first
use. Features in half precision are widened to float32 tile by tile, so that all products are computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._precision import accumulation_dtype
from ..partition import Tile, tiles


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
        index: (b,), the rows of `x` that are X's rows, read tile by tile; None: all of them.

    Attributes:
        count: b.
    """

    def __init__(
        self,
        x: Tensor,
        scale: float,
        bias: float = 0.0,
        *,
        side: int,
        largest: tuple[int, int] | None = None,
        norms: Tensor | None = None,
        col_norms: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        self.x, self.scale, self.bias, self.side, self.norms, self.col_norms = x, scale, bias, side, norms, col_norms
        self.index, self.count = index, len(x) if index is None else len(index)
        self.dtype, self.width = accumulation_dtype(x.dtype), x.shape[1]
        rows, cols = (min(side, n) for n in largest or (side, side))
        self._entries, self._tiles = rows * cols, dict[int, Tensor]()
        self._wide, self._side_rows = dict[str, Tensor](), {"x": rows, "y": cols}

    def tiles(self, block: Block) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        """Yield each tile with its rows of X and of Y, in the accumulation dtype."""
        rows, x = None, self.x[:0]
        for tile in tiles(block.rows, block.cols, self.side, triangle=block.triangle):
            if tile.rows != rows:
                rows, x = tile.rows, self._unit("x", self.rows(tile.rows), self.norms, tile.rows)
            y = block.y[relative(tile.cols, block), : self.width]
            yield tile, x, self._unit("y", y, self.col_norms, tile.cols)

    def rows(self, at: slice) -> Tensor:
        """Return some of X's rows."""
        return self.x[at] if self.index is None else self.x.index_select(0, self.index[at])

    def _unit(self, tower: str, x: Tensor, norms: Tensor | None, at: slice) -> Tensor:
        """Return rows in the accumulation dtype, divided by their norms."""
        if norms is None and x.dtype == self.dtype:
            return x
        if tower not in self._wide:
            self._wide[tower] = x.new_empty(self._side_rows[tower], self.width, dtype=self.dtype)
        buffer = self._wide[tower][: len(x)]
        return buffer.copy_(x) if norms is None else torch.div(x, norms[at], out=buffer)

    def logits(self, tile: Tile, x: Tensor, y: Tensor) -> Tensor:
        """Return the tile of S, in a buffer that the next tile overwrites."""
        # Scale after the product: given as alpha, some libraries scale and round the entries of one factor first.
        logits = torch.mm(x, y.T, out=self.buffer(tile)).mul_(self.scale)
        if tile.self_transposed:  # a product may round S_ij and S_ji differently
            below = torch.triu(logits, 1, out=self.scratch(tile)).T
            logits.triu_().add_(below)
        return logits.add_(self.bias) if self.bias else logits

    def buffer(self, tile: Tile) -> Tensor:
        """Return the memory of the tile of S."""
        return self._memory(0, tile)

    def scratch(self, tile: Tile) -> Tensor:
        """Return memory for a second tile."""
        return self._memory(1, tile)

    def spare(self, tile: Tile, number: int = 0) -> Tensor:
        """Return memory for a further tile, by its number."""
        return self._memory(2 + number, tile)

    def _memory(self, number: int, tile: Tile) -> Tensor:
        if number not in self._tiles:
            self._tiles[number] = self.x.new_empty(self._entries, dtype=self.dtype)
        rows, cols = tile.shape
        return self._tiles[number][: rows * cols].view(rows, cols)

    def products(
        self, grad: Tensor, tile: Tile, x: Tensor, y: Tensor, block: Block, u: Tensor | None, v: Tensor | None
    ) -> None:
        """Add the tile of dS times its rows of Y to `u`, (b, d), and its transpose times X to `v`, (n, d)."""
        if u is not None:
            u[tile.rows].addmm_(grad, y)
        if v is not None and not tile.self_transposed:
            v[relative(tile.cols, block)].addmm_(grad.T, x)


def relative(cols: slice, block: Block) -> slice:
    """Return columns of the global batch as columns of the block."""
    return slice(cols.start - block.cols.start, cols.stop - block.cols.start)
