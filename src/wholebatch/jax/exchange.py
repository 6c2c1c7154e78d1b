"""How the columns' features travel, and the sums for them come home.

"gather": one all_gather of Y, then one sweep; sums for the columns of all devices, and home by one psum_scatter.

"ring": each device has one block of Y at a time. What the next step needs, and what the step before has found, is under
way while a block's tiles are computed; after the last step the sums take one message home.

    step               0         1         2         3
    device i visits    block i   i + 1     i + 2     i + 3       of W = 4; a symmetric S is through after i + 2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from .axis import Axis, vary_alike
from .logsumexp import add, bring_home
from .tiles import Tiles, Visit, half, joined, pad_rows, rectangle, side_of_tiles, sweep_tiles, triangle

Exchange = Literal["gather", "ring"]
Memory = Literal["flat"] | int


@dataclass(frozen=True)
class Sweep:
    """One pass over all tiles of S that this device computes.

    Args:
        axis: over which the batch is split.
        exchange: "gather" or "ring"; the same in all sweeps over the same rows.
        tile: rows and columns of a tile, at most.
        symmetric: S = Z Z^T, half of which is computed; the sums are then those of `x` and of `y`, to be added.
        memory: bytes for products that are kept for another sweep, in a ring of a device's own rows only; "flat": none.
    """

    axis: Axis
    exchange: Exchange
    tile: int
    symmetric: bool = False
    memory: Memory = "flat"

    def __call__(
        self,
        visit: Visit,
        x: Any,
        y: Any,
        nothing: Callable[[int], Any],
        *,
        keep: Any = None,
        kept: Array | None = None,
    ) -> tuple[Any, Any, Array | None]:
        """What `visit` makes of all tiles, added up for this device's rows of x and of y; and the products kept.

        Args:
            visit: as :func:`wholebatch.jax.tiles.sweep_tiles` takes it.
            x: a tree of arrays with b rows, which stay.
            y: one with as many or other rows, which travels; of a symmetric S the same.
            nothing: the sums of no tiles for so many rows of x, and for so many of y.
            keep: the dtype of products that are to be kept, as far as there is memory; None: they are not.
            kept: those that an earlier sweep over the same rows has kept.
        """
        rows, cols = _rows(x), _rows(y)
        sides = side_of_tiles(rows, self.tile), side_of_tiles(cols, self.tile)
        x, y = pad_rows(x, sides[0]), pad_rows(y, sides[1])
        x, y, of_x, of_y = vary_alike(x, y, nothing(_rows(x))[0], nothing(_rows(y))[1], axis=self.axis)
        room = 0
        if keep is not None and self.memory != "flat":
            room = self.memory // (sides[0] * sides[1] * jnp.dtype(keep).itemsize)

        def go(tiles: Tiles, y: Any, of_x: Any, of_y: Any, *, first: bool = True) -> tuple[Any, Any, Array | None]:
            """Through a list of tiles; only of the first list products are kept."""
            places, stored = (min(room, len(tiles.rows)), kept) if first else (0, None)
            return sweep_tiles(tiles, sides, visit, x, y, of_x, of_y, keep=places, kept=stored)

        blocks = self._blocks(_rows(x) // sides[0], _rows(y) // sides[1])
        if self.axis.size == 1:
            of_x, of_y, kept = go(blocks[0], y, of_x, of_y)
        elif self.exchange == "gather":
            y_full = self.axis.gather(y)
            y_full, of_all = vary_alike(y_full, nothing(_rows(y_full))[1], axis=self.axis)
            of_x, of_all, kept = go(self._joined(blocks, _rows(y) // sides[1]), y_full, of_x, of_all)
            of_y = bring_home(self.axis, of_all)
        else:
            of_x, of_y, kept = self._ring(go, blocks, y, of_x, of_y)
        return _first(of_x, rows), _first(of_y, cols), kept

    def _blocks(self, rows: int, cols: int) -> list[Tiles]:
        """The tiles of each block of columns that this device visits: the own, the next one's, and so on."""
        size, whole = self.axis.size, rectangle(rows, cols)
        if not self.symmetric:
            return [whole] * size
        shared = [half(rows, self.axis.index < size // 2)] * (size % 2 == 0)
        return [triangle(rows), *[whole] * ((size - 1) // 2), *shared]

    def _joined(self, blocks: list[Tiles], cols: int) -> Tiles:
        """All of these, among the columns of all devices, of which each has so many tiles."""
        if not self.symmetric:  # the order is that of memory
            return rectangle(len(blocks[0].rows) // cols, cols * self.axis.size)
        return joined(blocks, [(self.axis.index + k) % self.axis.size * cols for k in range(len(blocks))])

    def _ring(
        self, go: Callable[..., tuple[Any, Any, Array | None]], blocks: list[Tiles], y: Any, of_x: Any, nobodys: Any
    ) -> tuple[Any, Any, Array | None]:
        def step(carried: tuple[Any, Any, Any], tiles: Tiles) -> tuple[Any, Any]:
            of_x, y, of_y = carried
            arriving = self.axis.take_from(of_y, 1)
            of_x, found, _ = go(tiles, y, of_x, nobodys, first=False)
            return of_x, add(arriving, found)

        def middle(carried: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
            following = self.axis.take_from(carried[1], 1)
            of_x, of_y = step(carried, blocks[1])
            return (of_x, following, of_y), None

        following = self.axis.take_from(y, 1)
        of_x, of_y, kept = go(blocks[0], y, of_x, nobodys)
        carried = (of_x, following, of_y)
        if len(blocks) > 2:
            carried, _ = lax.scan(middle, carried, None, length=len(blocks) - 2)
        of_x, of_y = step(carried, blocks[-1])
        return of_x, self.axis.take_from(of_y, 1 - len(blocks)), kept


def _rows(tree: Any) -> int:
    return len(jax.tree.leaves(tree)[0])


def _first(tree: Any, rows: int) -> Any:
    return jax.tree.map(lambda x: x[:rows], tree)
