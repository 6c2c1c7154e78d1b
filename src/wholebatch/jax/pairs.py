"""Which entries of S are positive and which are excluded, from integer codes of the rows that meet."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .tiles import side_of_tiles


class Codes(NamedTuple):
    """Codes of the rows of a tower, (b,), which make an entry positive or exclude it; None has no such entries."""

    valid: Array | None = None  # whether the row belongs to the batch and is no padding
    itself: Array | None = None  # entries with equal codes are excluded: a row beside itself
    pair: Array | None = None  # entries with equal codes, other than those, are positive
    same: Array | None = None  # entries with equal codes that are not positive are excluded

    @classmethod
    def of_pairs(cls, example: Array, ids: Array | None, valid: Array | None, *, positive: bool) -> Codes:
        """Return the codes of paired rows, where equal ids are positive, or else excluded."""
        if ids is None:
            return cls(valid, pair=example)
        return cls(valid, pair=ids) if positive else cls(valid, pair=example, same=ids)


class Tower(NamedTuple):
    """Features of b rows, (b, d), their inverse norms if they are normalized, and their codes."""

    features: Array
    inverse_norms: Array | None
    codes: Codes


def with_valid(tower: Tower, tile: int) -> Tower:
    """Mark all rows valid if rows of zeros will fill the last tile, so that these can be distinguished."""
    b = len(tower.features)
    return tower if b % side_of_tiles(b, tile) == 0 else _with_flags(tower)


def concatenated(first: Tower, second: Tower) -> Tower:
    """Concatenate the rows of two towers that have the same kinds of codes; all rows of one may be valid."""
    if (first.codes.valid is None) != (second.codes.valid is None):
        first, second = _with_flags(first), _with_flags(second)
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), first, second)


def _with_flags(tower: Tower) -> Tower:
    """Mark the valid rows by flags, even if these are all rows."""
    if tower.codes.valid is not None:
        return tower
    return tower._replace(codes=tower.codes._replace(valid=jnp.ones(len(tower.features), bool)))


def entries(x: Codes, y: Codes) -> tuple[Array | None, Array | None]:
    """Return masks of a tile's candidates, which are not excluded, and of its positives; None for all, and for none."""

    def equal(name: str) -> Array | None:
        left, right = getattr(x, name), getattr(y, name)
        return None if left is None or right is None else left[:, None] == right

    itself, pair, same = equal("itself"), equal("pair"), equal("same")
    valid = None
    for flags, axis in ((x.valid, 1), (y.valid, 0)):
        valid = _and(valid, None if flags is None else jnp.expand_dims(flags, axis))
    distinct = None if itself is None else ~itself
    positive = None if pair is None else _and(_and(pair, distinct), valid)
    if same is not None:
        same = same if pair is None else same & ~pair
    return _and(_and(distinct, None if same is None else ~same), valid), positive


def _and(left: Array | None, right: Array | None) -> Array | None:
    """Combine two masks, where None is a mask that holds everywhere."""
    if left is None or right is None:
        return right if left is None else left
    return left & right
