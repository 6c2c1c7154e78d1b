"""A pass over all tiles of S that a device computes: it pads rows to whole tiles, and runs the exchange.

The memory of a pass is that of a few tiles, and of the products X Y^T that it keeps for the backward pass, which then
does not compute them again: those of the first tiles, as many as fit into the given bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .axis import Axis, vary_alike
from .exchange import Exchange, gather, gathered_tiles, ring, visited_blocks
from .tiles import Tiles, Visit, pad_rows, side_of_tiles, sweep_tiles


@dataclass(frozen=True)
class Sweep:
    """One pass over all tiles of S that this device computes.

    Args:
        axis: the axis over which the batch is split.
        exchange: "gather" or "ring"; the same in all sweeps over the same rows.
        tile: rows and columns of a tile, at most.
        symmetric: S = Z Z^T, half of which is computed; the sums are then those of `x` and of `y`, to be added.
        memory: bytes of the products that are kept for another sweep; in a ring those of the device's local block only.
    """

    axis: Axis
    exchange: Exchange
    tile: int
    symmetric: bool = False
    memory: int = 0

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
        room = 0 if keep is None else self.memory // (sides[0] * sides[1] * jnp.dtype(keep).itemsize)

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


def _rows(tree: Any) -> int:
    return len(jax.tree.leaves(tree)[0])


def _first(tree: Any, rows: int) -> Any:
    return jax.tree.map(lambda x: x[:rows], tree)
