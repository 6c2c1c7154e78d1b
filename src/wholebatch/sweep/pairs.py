"""Sets of entries of the similarity matrix: the positive pairs, and the excluded entries.

A sweep asks two sets for their entries in a tile. The answer is an index, with which `matrix[index]` reads and writes
these entries, or None if there are none:

    positive.within(tile)    the entries that are targets
    excluded.within(tile)    the entries that are no negatives; one that is positive counts as a positive only

All other entries are negatives. The exponential and the gradient of an excluded entry are 0 unless it is positive. A
set is described by O(B) numbers, never by a B x B mask: by diagonals, if row k of one tower belongs to row k of the
other; or by integer ids of rows and columns, if those with equal ids belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..partition import Diagonal, Tile

Index = tuple[Tensor, Tensor]


class Entries(Protocol):
    """A set of entries, in local rows and columns of the global batch."""

    @property
    def few(self) -> bool:
        """Whether a tile has at most a few of them for each row or column, so that rows may be copied for each."""
        ...

    def within(self, tile: Tile, device: torch.device) -> Index | None:
        """Return the entries of the tile, relative to its first row and column; None if there are none."""
        ...


class Diagonals:
    """The entries of some diagonals.

    >>> Diagonals(Diagonal(0, 2, 3)).within(Tile(slice(1, 4), slice(0, 4)), torch.device("cpu"))
    (tensor([0]), tensor([3]))
    """

    few = True

    def __init__(self, *diagonals: Diagonal) -> None:
        self.diagonals = diagonals
        self.places = tuple((diagonal.row, diagonal.col, diagonal.length) for diagonal in diagonals)

    def within(self, tile: Tile, device: torch.device) -> Index | None:
        parts = [diagonal.within(tile) for diagonal in self.diagonals]
        parts = [part for part in parts if part[2]]
        if not parts:
            return None
        rows = torch.cat([torch.arange(row, row + length, device=device) for row, _, length in parts])
        cols = torch.cat([torch.arange(col, col + length, device=device) for _, col, length in parts])
        return rows, cols


class EqualIds:
    """The entries whose row and column have the same id, without the entries of another set.

    Args:
        rows: (b,) ids of the local rows.
        cols: (B,) ids of all columns.
        but: the entries that are left out; None: all count.

    >>> pairs = EqualIds(torch.tensor([7, 8]), torch.tensor([8, 7, 8]), but=Diagonals(Diagonal(0, 1, 2)))
    >>> pairs.within(Tile(slice(0, 2), slice(0, 3)), torch.device("cpu"))
    (tensor([1]), tensor([0]))
    """

    few = False

    def __init__(self, rows: Tensor, cols: Tensor, *, but: Entries | None = None) -> None:
        self.rows, self.cols, self.but = rows, cols, but

    def within(self, tile: Tile, device: torch.device) -> Index | None:
        mask = self.rows[tile.rows, None] == self.cols[None, tile.cols]
        left_out = self.but.within(tile, device) if self.but is not None else None
        if left_out is not None:
            mask[left_out] = False
        rows, cols = mask.nonzero(as_tuple=True)
        return (rows, cols) if len(rows) else None


class NamedRows:
    """The entries in the rows that each column names.

    Args:
        rows: (B, k) or (B,), local rows for each column, or -1 where a row is on another rank; no row twice.

    >>> NamedRows(torch.tensor([2, -1, 1])).within(Tile(slice(1, 3), slice(0, 3)), torch.device("cpu"))
    (tensor([1, 0]), tensor([0, 2]))
    """

    few = True

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.view(len(rows), -1)

    def within(self, tile: Tile, device: torch.device) -> Index | None:
        rows = self.rows[tile.cols]
        cols = ((rows >= tile.rows.start) & (rows < tile.rows.stop)).nonzero(as_tuple=True)
        return (rows[cols] - tile.rows.start, cols[0]) if len(cols[0]) else None


class Union:
    """The entries of several disjoint sets."""

    def __init__(self, *sets: Entries) -> None:
        self.sets = sets

    @property
    def few(self) -> bool:
        return all(entries.few for entries in self.sets)

    def within(self, tile: Tile, device: torch.device) -> Index | None:
        indices = [index for index in (entries.within(tile, device) for entries in self.sets) if index is not None]
        if not indices:
            return None
        rows, cols = zip(*indices, strict=True)
        return torch.cat(rows), torch.cat(cols)


NONE = Diagonals()


@dataclass(frozen=True)
class Pairs:
    """Positive and excluded entries; all others are negative."""

    positive: Entries = NONE
    excluded: Entries = NONE

    @cached_property
    def kinds(self) -> tuple[str, str]:
        """The kinds of the two sets, the same on all ranks.

        >>> Pairs(Diagonals(Diagonal(0, 0, 3))).kinds
        ('Diagonals', 'none')
        """
        return _kind(self.positive), _kind(self.excluded)


def _kind(entries: Entries | None) -> str:
    if entries is None or entries is NONE:
        return "none"
    inside: list[Entries | None] = [*entries.sets] if isinstance(entries, Union) else []
    inside += [entries.but] if isinstance(entries, EqualIds) else []
    contents = f" of {' and '.join(map(_kind, inside))}" if inside else ""
    return f"{type(entries).__name__}{contents}"
