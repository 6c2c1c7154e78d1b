"""A pass over all tiles of S that a device computes: it pads rows to whole tiles, and runs the exchange.

The memory of a pass is that of a few tiles. `memory=` may add room for products X Y^T, which the backward pass then
reads instead of computing them again.

    "flat"   no products are kept: S is computed twice
    "auto"   "flat", unless all products of the device fit into one more tile: then they are kept
    bytes    of the products that are kept, the first tiles' ones
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from .axis import Axis, vary_alike
from .exchange import Exchange, gather, gathered_tiles, ring, visited_blocks
from .tiles import Tiles, Visit, pad_rows, side_of_tiles, sweep_tiles

Memory = Literal["auto", "flat"] | int


@dataclass(frozen=True)
class Sweep:
    """One pass over all tiles of S that this device computes.

    Args:
        axis: the axis over which the batch is split.
        exchange: "gather" or "ring"; the same in all sweeps over the same rows.
        tile: rows and columns of a tile, at most.
        symmetric: S = Z Z^T, half of which is computed; the sums are then those of `x` and of `y`, to be added.
        memory: "auto", "flat" or bytes, of the products that are kept for another sweep; in a ring those of the
            device's local block only.
    """

    axis: Axis
    exchange: Exchange
    tile: int
    symmetric: bool = False
    memory: Memory = "auto"

    def __call__(
        self,
        visit: Visit,
        x: Any,
        y: Any,
        empty: Callable[[int], Any],
        *,
        keep: Any = None,
        kept: Array | None = None,
    ) -> tuple[Any, Any, Array | None]:
        """Sum the results of `visit` over all tiles, for this device's rows of x and of y.

        Args:
            visit: as :func:`wholebatch.jax.tiles.sweep_tiles` takes it.
            x: a tree of arrays with b rows, which stay.
            y: a tree with as many or other rows, which travels; for a symmetric S the same.
            empty: makes the empty sums for so many rows of x, and for so many rows of y.
            keep: the dtype of the products to keep, as far as `memory` allows; None keeps none.
            kept: products that an earlier sweep over the same rows kept.

        Returns:
            The sums of rows, those of columns, and the kept products or None.
        """
        rows, cols = _rows(x), _rows(y)
        sides = side_of_tiles(rows, self.tile), side_of_tiles(cols, self.tile)
        x, y = pad_rows(x, sides[0]), pad_rows(y, sides[1])
        x, y, of_x, of_y = vary_alike(x, y, empty(_rows(x))[0], empty(_rows(y))[1], axis=self.axis)
        down, across = _rows(x) // sides[0], _rows(y) // sides[1]
        blocks = visited_blocks(self.axis, down, across, symmetric=self.symmetric)
        room = 0 if keep is None else self._tiles_kept(blocks, sides, jnp.dtype(keep).itemsize)

        def sweep(tiles: Tiles, y: Any, of_x: Any, of_y: Any, *, first: bool = True) -> tuple[Any, Any, Array | None]:
            """Go through a list of tiles; products are kept of the first list only."""
            places, stored = (min(room, len(tiles.rows)), kept) if first else (0, None)
            return sweep_tiles(tiles, sides, visit, (x, y), (of_x, of_y), keep=places, kept=stored)

        if self.axis.size == 1:
            of_x, of_y, kept = sweep(blocks[0], y, of_x, of_y)
        elif self.exchange == "gather":
            tiles = gathered_tiles(self.axis, blocks, across, symmetric=self.symmetric)
            of_x, of_y, kept = gather(self.axis, sweep, tiles, y, of_x, lambda columns: empty(columns)[1])
        else:
            of_x, of_y, kept = ring(self.axis, sweep, blocks, y, of_x, of_y)
        return _first(of_x, rows), _first(of_y, cols), kept

    def _tiles_kept(self, blocks: list[Tiles], sides: tuple[int, int], itemsize: int) -> int:
        """Return the number of tiles whose products may be kept."""
        entries = sides[0] * sides[1]
        if self.memory == "flat":
            return 0
        if self.memory == "auto":
            tiles = sum(len(block.rows) for block in blocks)
            return tiles if tiles * entries <= self.tile**2 else 0
        return self.memory // (entries * itemsize)


def _rows(tree: Any) -> int:
    return len(jax.tree.leaves(tree)[0])


def _first(tree: Any, rows: int) -> Any:
    return jax.tree.map(lambda x: x[:rows], tree)
