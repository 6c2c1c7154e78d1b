"""Tiles of S, one after the other: the result of each tile is added to the sums of its rows and of its columns.

`lax.scan` goes through a list of tiles and keeps nothing of a tile but these sums. A symmetric S = Z Z^T needs half of
the tiles: a tile above the diagonal also stands for its mirror image, and a tile on the diagonal is its own mirror
image, so that only the sums of its rows count. Two devices that hold each other's rows share the tiles between them.
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
    """A list of tiles: their rows and columns in units of a tile's side, and whether each side's sums count."""

    rows: Any
    cols: Any
    for_rows: Any
    for_cols: Any


def rectangle(rows: int, cols: int) -> Tiles:
    """List all tiles, row by row."""
    indices = np.indices((rows, cols)).reshape(2, -1)
    return Tiles(indices[0], indices[1], np.ones(rows * cols, bool), np.ones(rows * cols, bool))


def triangle(side: int) -> Tiles:
    """List the tiles on the diagonal, whose columns are their rows, and those above it."""
    rows, cols = np.triu_indices(side)
    return Tiles(rows, cols, np.ones(len(rows), bool), rows != cols)


def half(side: int, first: Array) -> Tiles:
    """List the tiles that one of two devices computes, of all side x side tiles between their rows.

    One has the first half of them; the other has the rest, in which its rows are the columns.
    """
    rows, cols = np.indices((side, side)).reshape(2, -1)
    share = ceil(side * side / 2)
    mine, others = np.arange(share), share + np.arange(share)
    exists = others < side * side
    others = np.minimum(others, side * side - 1)
    counts = jnp.where(first, True, jnp.asarray(exists))
    return Tiles(jnp.where(first, rows[mine], cols[others]), jnp.where(first, cols[mine], rows[others]), counts, counts)


def joined(lists: list[Tiles], first_cols: list[Array]) -> Tiles:
    """Join several lists into one, each with its columns moved to begin at its entry of `first_cols`."""
    moved = [tiles._replace(cols=tiles.cols + first) for tiles, first in zip(lists, first_cols, strict=True)]
    return jax.tree.map(lambda *parts: jnp.concatenate([jnp.asarray(part) for part in parts]), *moved)


def side_of_tiles(rows: int, at_most: int) -> int:
    """Return the rows of a tile if as few tiles as possible, all equal, have at most `at_most` rows each."""
    return ceil(rows / ceil(rows / at_most)) if rows else 1


def pad_rows(tree: Any, side: int) -> Any:
    """Append rows of zeros until the number of rows is a multiple of `side`."""

    def padded(x: Array) -> Array:
        missing = -len(x) % side
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x

    return jax.tree.map(padded, tree)


def sweep_tiles(
    tiles: Tiles,
    sides: tuple[int, int],
    visit: Visit,
    towers: tuple[Any, Any],
    sums: tuple[Any, Any],
    *,
    keep: int = 0,
    kept: Array | None = None,
) -> tuple[Any, Any, Array | None]:
    """Add the results of `visit` on each tile to the sums of its rows and of its columns.

    Args:
        tiles: the tiles to visit.
        sides: rows and columns of a tile.
        visit: takes the rows of x and of y that meet in a tile, and the tile's products if they were kept; returns the
            sums over the tile for its rows and for its columns, and the products.
        towers: x, a tree of arrays with a row for each row of S, and y, with a row for each column.
        sums: the sums so far, of rows and of columns.
        keep: the number of tiles, from the first, whose products are kept.
        kept: products that an earlier sweep over the same tiles kept.

    Returns:
        The sums of rows, those of columns, and the kept products, (tiles, rows, columns), or None.
    """

    def step(sums: tuple[Any, Any], inputs: tuple[Tiles, Array | None]) -> tuple[tuple[Any, Any], Array | None]:
        tile, products = inputs
        starts = tile.rows * sides[0], tile.cols * sides[1]
        x, y = (_slice(tower, start, side) for tower, start, side in zip(towers, starts, sides, strict=True))
        *parts, products = visit(x, y, products)
        counts = (tile.for_rows, tile.for_cols)
        new = [
            _add_slice(total, start, side, part, counted)
            for total, start, side, part, counted in zip(sums, starts, sides, parts, counts, strict=True)
        ]
        return (new[0], new[1]), products

    all_count = all(isinstance(flags, np.ndarray) and flags.all() for flags in (tiles.for_rows, tiles.for_cols))
    if all_count:
        tiles = tiles._replace(for_rows=None, for_cols=None)
    tiles = jax.tree.map(jnp.asarray, tiles)
    first = keep if kept is None else len(kept)
    if first:
        sums, products = _scan(step, sums, (jax.tree.map(lambda x: x[:first], tiles), kept))
        kept = products if kept is None else None
    if first < len(tiles.rows):
        sums, _ = _scan(
            lambda sums, inputs: (step(sums, inputs)[0], None), sums, (jax.tree.map(lambda x: x[first:], tiles), None)
        )
    return *sums, kept


def _scan(step: Callable[[Any, Any], tuple[Any, Any]], carried: Any, inputs: Any) -> tuple[Any, Any]:
    """Scan; a single step is no loop, so that the compiler fuses it with the code around it."""
    if len(jax.tree.leaves(inputs)[0]) > 1:
        return lax.scan(step, carried, inputs)
    carried, out = step(carried, jax.tree.map(lambda x: x[0], inputs))
    return carried, jax.tree.map(lambda x: x[None], out)


def _slice(tree: Any, start: Array, rows: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, rows), tree)


def _add_slice(tree: Any, start: Array, rows: int, part: Any, counted: Array | None) -> Any:
    """Add `part` to the rows from `start` on, unless `counted` is false."""
    before = _slice(tree, start, rows)
    after = add(before, part)
    if counted is not None:
        after = jax.tree.map(lambda new, old: jnp.where(counted, new, old), after, before)
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, 0), tree, after)
