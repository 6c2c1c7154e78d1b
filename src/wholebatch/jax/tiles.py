"""Tiles of S, one after the other: what is made of a tile is added to sums of its rows and of its columns.

`lax.scan` goes through a list of tiles; nothing of a tile outlives its turn but those sums. A symmetric S = Z Z^T needs
half of them: a tile above the diagonal stands for its mirror image, too, and one on the diagonal is its own, so that
its rows say all that there is to say. Two devices that hold each other's rows share the tiles between them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .logsumexp import add

Visit = Callable[[Any, Any, Array | None], tuple[Any, Any, Array | None]]


class Tiles(NamedTuple):
    """A list of tiles: which rows, which columns, in units of a tile's side; and for whom their sums count."""

    rows: Any
    cols: Any
    for_rows: Any
    for_cols: Any


def rectangle(rows: int, cols: int) -> Tiles:
    """All of them, row by row."""
    at = np.indices((rows, cols)).reshape(2, -1)
    return Tiles(at[0], at[1], np.ones(rows * cols, bool), np.ones(rows * cols, bool))


def triangle(side: int) -> Tiles:
    """The diagonal, whose columns are its rows, and what is above it."""
    rows, cols = np.triu_indices(side)
    return Tiles(rows, cols, np.ones(len(rows), bool), rows != cols)


def half(side: int, first: Array) -> Tiles:
    """Of the tiles between two devices those that one of them does.

    Args:
        side: tiles of either's rows.
        first: whether this is the one that begins; the other has the rest, in which its rows are the other's columns.
    """
    rows, cols = np.indices((side, side)).reshape(2, -1)
    share = ceil(side * side / 2)
    mine, others = np.arange(share), share + np.arange(share)
    there_is = others < side * side
    others = np.minimum(others, side * side - 1)
    counts = jnp.where(first, True, jnp.asarray(there_is))
    return Tiles(jnp.where(first, rows[mine], cols[others]), jnp.where(first, cols[mine], rows[others]), counts, counts)


def joined(lists: list[Tiles], first_cols: list[Array]) -> Tiles:
    """Several lists as one, each with its columns from another place on."""
    moved = [tiles._replace(cols=tiles.cols + first) for tiles, first in zip(lists, first_cols, strict=True)]
    return jax.tree.map(lambda *parts: jnp.concatenate([jnp.asarray(part) for part in parts]), *moved)


def side_of_tiles(rows: int, at_most: int) -> int:
    """Of equal tiles, as few as there can be of that size."""
    return ceil(rows / ceil(rows / at_most)) if rows else 1


def pad_rows(tree: Any, side: int) -> Any:
    """Rows of zeros below, so that parts of that side fill it."""

    def padded(x: Array) -> Array:
        missing = -len(x) % side
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x

    return jax.tree.map(padded, tree)


def sweep_tiles(
    tiles: Tiles,
    sides: tuple[int, int],
    visit: Visit,
    x: Any,
    y: Any,
    of_x: Any,
    of_y: Any,
    *,
    keep: int = 0,
    kept: Array | None = None,
) -> tuple[Any, Any, Array | None]:
    """Add what `visit` makes of each tile to the sums of its rows and columns.

    Args:
        tiles: which.
        sides: rows and columns of a tile.
        visit: of the rows of x and y that meet in a tile, and of their products if these were kept, the sums over it,
            for its rows and for its columns, and the products.
        x: a tree of arrays with a row for each row of S.
        y: one with a row for each column.
        of_x: sums so far, likewise.
        of_y: those of columns.
        keep: of how many tiles the products are to be kept, the first ones.
        kept: those of an earlier sweep over the same tiles.

    Returns:
        The sums, and what has been kept, (tiles, rows, columns), or None.
    """

    def step(sums: tuple[Any, Any], given: tuple[Tiles, Array | None]) -> tuple[tuple[Any, Any], Array | None]:
        tile, products = given
        starts = tile.rows * sides[0], tile.cols * sides[1]
        *found, products = visit(_cut(x, starts[0], sides[0]), _cut(y, starts[1], sides[1]), products)
        counts = (tile.for_rows, tile.for_cols)
        new = [
            _put(all_of, start, side, part, counted)
            for all_of, start, side, part, counted in zip(sums, starts, sides, found, counts, strict=True)
        ]
        return (new[0], new[1]), products

    everything = all(isinstance(of, np.ndarray) and of.all() for of in (tiles.for_rows, tiles.for_cols))
    if everything:
        tiles = tiles._replace(for_rows=None, for_cols=None)
    tiles = jax.tree.map(jnp.asarray, tiles)
    sums, first = (of_x, of_y), keep if kept is None else len(kept)
    if first:
        sums, products = lax.scan(step, sums, (jax.tree.map(lambda of: of[:first], tiles), kept))
        kept = products if kept is None else None
    if first < len(tiles.rows):
        sums, _ = lax.scan(
            lambda sums, given: (step(sums, given)[0], None), sums, (jax.tree.map(lambda of: of[first:], tiles), None)
        )
    return *sums, kept


def _cut(tree: Any, start: Array, rows: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, rows), tree)


def _put(tree: Any, start: Array, rows: int, part: Any, counted: Array | None) -> Any:
    before = _cut(tree, start, rows)
    after = add(before, part)
    if counted is not None:
        after = jax.tree.map(lambda new, old: jnp.where(counted, new, old), after, before)
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, 0), tree, after)
