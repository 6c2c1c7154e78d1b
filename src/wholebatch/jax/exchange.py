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

ExchangeName = Literal["auto", "gather", "ring"]
Memory = Literal["flat"] | int
_GATHER_BYTES = 2**30  # Y of all devices, its gradient, and the sum of that


@dataclass(frozen=True)
class Sweep:
    """One pass over all tiles of S that this device computes.

    Args:
        axis: over which the batch is split.
        exchange: "auto", "gather" or "ring".
        tile: rows and columns of a tile, at most.
        symmetric: S = Z Z^T, half of which is computed; the sums are then those of `x` and of `y`, to be added.
        memory: bytes for products that are kept for another sweep; in a ring, of a device's own rows only.
    """

    axis: Axis
    exchange: ExchangeName
    tile: int
    symmetric: bool = False
    memory: int = 0

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
        store = self._Store(
            0 if keep is None else self.memory // (sides[0] * sides[1] * jnp.dtype(keep).itemsize), kept
        )
        if self.axis.size == 1:
            tiles = self._own(x, y, sides)
            of_x, of_y, kept = sweep_tiles(tiles, sides, visit, x, y, of_x, of_y, **store.of(tiles))
        elif self._gathers(y):
            of_x, of_y, kept = self._gather(visit, sides, x, y, of_x, nothing, store)
        else:
            of_x, of_y, kept = self._ring(visit, sides, x, y, of_x, of_y, store)
        return _first(of_x, rows), _first(of_y, cols), kept

    @dataclass(frozen=True)
    class _Store:
        """How many tiles' products there is room for, and those that have been kept."""

        room: int
        kept: Array | None

        def of(self, tiles: Tiles) -> dict[str, Any]:
            """What :func:`sweep_tiles` is to be told."""
            return {"keep": min(self.room, len(tiles.rows)), "kept": self.kept}

    def _gathers(self, y: Any) -> bool:
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(y)) * self.axis.size
        return self.exchange == "gather" or (self.exchange == "auto" and 3 * size <= _GATHER_BYTES)

    def _own(self, x: Any, y: Any, sides: tuple[int, int]) -> Tiles:
        rows, cols = _rows(x) // sides[0], _rows(y) // sides[1]
        return triangle(rows) if self.symmetric else rectangle(rows, cols)

    def _others(self, x: Any, y: Any, sides: tuple[int, int]) -> list[Tiles]:
        """Of the blocks that come after the own."""
        size, rows, cols = self.axis.size, _rows(x) // sides[0], _rows(y) // sides[1]
        if not self.symmetric:
            return [rectangle(rows, cols)] * (size - 1)
        whole = [rectangle(rows, cols)] * ((size - 1) // 2)
        return whole + [half(rows, self.axis.index < size // 2)] * (size % 2 == 0)

    def _gather(
        self,
        visit: Visit,
        sides: tuple[int, int],
        x: Any,
        y: Any,
        of_x: Any,
        nothing: Callable[[int], Any],
        store: _Store,
    ) -> tuple[Any, Any, Array | None]:
        blocks = [self._own(x, y, sides), *self._others(x, y, sides)]
        in_a_block, size = _rows(y) // sides[1], self.axis.size
        if self.symmetric:
            tiles = joined(blocks, [(self.axis.index + k) % size * in_a_block for k in range(len(blocks))])
        else:
            tiles = rectangle(_rows(x) // sides[0], in_a_block * size)
        y_full = self.axis.gather(y)
        y_full, of_y = vary_alike(y_full, nothing(_rows(y_full))[1], axis=self.axis)
        of_x, of_y, kept = sweep_tiles(tiles, sides, visit, x, y_full, of_x, of_y, **store.of(tiles))
        return of_x, bring_home(self.axis, of_y), kept

    def _ring(
        self, visit: Visit, sides: tuple[int, int], x: Any, y: Any, of_x: Any, of_y: Any, store: _Store
    ) -> tuple[Any, Any, Array | None]:
        others, nobodys = self._others(x, y, sides), of_y

        def step(carried: tuple[Any, Any, Any], tiles: Tiles) -> tuple[Any, Any]:
            of_x, y, of_y = carried
            arriving = self.axis.take_from(of_y, 1)
            of_x, found, _ = sweep_tiles(tiles, sides, visit, x, y, of_x, nobodys)
            return of_x, add(arriving, found)

        def middle(carried: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
            following = self.axis.take_from(carried[1], 1)
            of_x, of_y = step(carried, others[0])
            return (of_x, following, of_y), None

        following = self.axis.take_from(y, 1)
        own = self._own(x, y, sides)
        of_x, of_y, kept = sweep_tiles(own, sides, visit, x, y, of_x, of_y, **store.of(own))
        carried = (of_x, following, of_y)
        if len(others) > 1:
            carried, _ = lax.scan(middle, carried, None, length=len(others) - 1)
        of_x, of_y = step(carried, others[-1])
        return of_x, self.axis.take_from(of_y, -len(others)), kept


def bytes_of(memory: Memory) -> int:
    """For products that are kept."""
    return 0 if memory == "flat" else memory


def _rows(tree: Any) -> int:
    return len(jax.tree.leaves(tree)[0])


def _first(tree: Any, rows: int) -> Any:
    return jax.tree.map(lambda x: x[:rows], tree)
