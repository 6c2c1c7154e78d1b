"""A pass over all tiles of S that a device computes: how columns travel, and how the sums over them return.

"gather": one all_gather of Y, one pass over all columns, and one psum_scatter of their sums to the owners.

"ring": each device holds one block of Y at a time. The block of the next step and the sums of the previous step travel
while the tiles of a block are computed; after the last step one message returns the sums to their owners.

    step               0         1         2         3
    device i visits    block i   i + 1     i + 2     i + 3       for W = 4; a symmetric S is done after i + 2

The memory of a pass is that of a few tiles, and of the products X Y^T that it keeps for the backward pass, which then
does not compute them again: those of the first tiles, as many as fit into the given bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .axis import Axis, vary_alike
from .logsumexp import add, reduce_to_owner
from .tiles import Tiles, Visit, half, joined, pad_rows, rectangle, side_of_tiles, sweep_tiles, triangle


@dataclass(frozen=True)
class Sweep:
    """One pass over all tiles of S that this device computes."""

    axis: Axis  # over which the batch is split
    exchange: str  # "gather" or "ring"; the same in all sweeps over the same rows
    tile: int  # rows and columns of a tile, at most
    symmetric: bool = False  # S = Z Z^T, half of which is computed; the sums of `x` and of `y` are then to be added
    memory: int = 0  # bytes of products that are kept for another sweep; in a ring of the device's local block only

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
        axis, rows, cols = self.axis, _rows(x), _rows(y)
        sides = side_of_tiles(rows, self.tile), side_of_tiles(cols, self.tile)
        x, y = pad_rows(x, sides[0]), pad_rows(y, sides[1])
        x, y, x_sums, y_sums = vary_alike(x, y, empty(_rows(x))[0], empty(_rows(y))[1], axis=axis)
        across = _rows(y) // sides[1]
        blocks = self._blocks(_rows(x) // sides[0], across)
        room = 0 if keep is None else self.memory // (sides[0] * sides[1] * jnp.dtype(keep).itemsize)

        def sweep(
            tiles: Tiles, y: Any, x_sums: Any, y_sums: Any, *, first: bool = True
        ) -> tuple[Any, Any, Array | None]:
            """Add the results of a list of tiles to sums; products are kept of the first list only."""
            places, stored = (min(room, len(tiles.rows)), kept) if first else (0, None)
            return sweep_tiles(tiles, sides, visit, (x, y), (x_sums, y_sums), keep=places, kept=stored)

        if axis.size == 1:
            x_sums, y_sums, kept = sweep(blocks[0], y, x_sums, y_sums)
        elif self.exchange == "gather":
            y_full = axis.gather(y)
            y_full, all_sums = vary_alike(y_full, empty(_rows(y_full))[1], axis=axis)
            x_sums, all_sums, kept = sweep(self._gathered(blocks, across), y_full, x_sums, all_sums)
            y_sums = reduce_to_owner(axis, all_sums)
        else:
            x_sums, y_sums, kept = _ring(axis, sweep, blocks, y, x_sums, y_sums)
        return _first(x_sums, rows), _first(y_sums, cols), kept

    def _blocks(self, down: int, across: int) -> list[Tiles]:
        """List the tiles of each block of columns that this device visits, from its local one on."""
        size, whole = self.axis.size, rectangle(down, across)
        if not self.symmetric:
            return [whole] * size
        shared = [half(down, self.axis.index < size // 2)] * (size % 2 == 0)
        return [triangle(down), *[whole] * ((size - 1) // 2), *shared]

    def _gathered(self, blocks: list[Tiles], across: int) -> Tiles:
        """Join the tiles of all blocks, among the columns of all devices, of which each device has `across` tiles."""
        size = self.axis.size
        if not self.symmetric:  # the order is that of memory
            return rectangle(len(blocks[0].rows) // across, across * size)
        return joined(blocks, [(self.axis.index + k) % size * across for k in range(len(blocks))])


def _ring(
    axis: Axis, sweep: Callable[..., Any], blocks: list[Tiles], y: Any, x_sums: Any, empty: Any
) -> tuple[Any, Any, Array | None]:
    """Sweep over one block of columns after another, while the next block and the previous sums travel."""

    def step(carried: tuple[Any, Any, Any], tiles: Tiles) -> tuple[Any, Any]:
        x_sums, y, y_sums = carried
        arriving = axis.receive_from(y_sums, 1)
        x_sums, added, _ = sweep(tiles, y, x_sums, empty, first=False)
        return x_sums, add(arriving, added)

    def middle(carried: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
        following = axis.receive_from(carried[1], 1)
        x_sums, y_sums = step(carried, blocks[1])
        return (x_sums, following, y_sums), None

    following = axis.receive_from(y, 1)
    x_sums, y_sums, kept = sweep(blocks[0], y, x_sums, empty)
    carried = (x_sums, following, y_sums)
    if len(blocks) > 2:
        carried, _ = lax.scan(middle, carried, None, length=len(blocks) - 2)
    x_sums, y_sums = step(carried, blocks[-1])
    return x_sums, axis.receive_from(y_sums, 1 - len(blocks)), kept


def _rows(tree: Any) -> int:
    return len(jax.tree.leaves(tree)[0])


def _first(tree: Any, rows: int) -> Any:
    return jax.tree.map(lambda x: x[:rows], tree)
