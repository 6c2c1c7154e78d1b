"""Sets of entries in the form that kernels take: the rows that each column names, and ids; never a list of entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from .. import kernels
from ..partition import Diagonal, Tile
from .pairs import Diagonals, Entries, EqualIds, NamedRows, Union

_NO_ENTRIES = kernels.Entries()
NO_IDS, OR_EQUAL_IDS, EQUAL_IDS_BUT = range(3)  # as in `kernels.tiles.common`
_NAMES = 4  # the most named rows of a column that a kernel takes


@dataclass(frozen=True)
class Members:
    """A set of entries, in local rows and columns of the global batch."""

    named: Tensor | None = None  # (k, B), int32, the rows that each column names, -1 where it names none; None without
    # ids: the set consists of: NO_IDS: the named entries; OR_EQUAL_IDS: the named entries and those with equal ids;
    # EQUAL_IDS_BUT: the entries with equal ids, without the named ones
    ids: int = NO_IDS
    # rows, cols: ids, int32; None without
    rows: Tensor | None = None
    cols: Tensor | None = None

    def of_tile(self, tile: Tile) -> kernels.Entries:
        """Return the entries of a tile in the form that a kernel takes."""
        if self.named is None and not self.ids:
            return _NO_ENTRIES
        named = None if self.named is None else self.named[:, tile.cols]
        rows = None if self.rows is None else self.rows[tile.rows]
        return kernels.Entries(named, self.ids, rows, None if self.cols is None else self.cols[tile.cols])


def members(entries: Entries, cols: int, device: torch.device) -> Members | None:
    """Return a set of entries of so many columns in the form of :class:`Members`; None if no such form exists.

    >>> members(NamedRows(torch.tensor([2, -1, 1])), 3, torch.device("cpu")).named
    tensor([[ 2, -1,  1]], dtype=torch.int32)
    """
    if isinstance(entries, Diagonals):
        return _named_members(_rows_on_diagonals(entries.diagonals, cols, device)) if entries.diagonals else Members()
    if isinstance(entries, NamedRows):
        return _named_members(entries.rows.T.to(device, torch.int32).contiguous())
    if isinstance(entries, EqualIds):
        but = Members() if entries.but is None else members(entries.but, cols, device)
        if but is None or but.ids != NO_IDS:
            return None
        return Members(but.named, EQUAL_IDS_BUT, *_number_ids(entries.rows, entries.cols))
    if isinstance(entries, Union) and len(entries.sets) == 2:
        beside, equal = entries.sets
        # The sets of a union are disjoint, so `equal` leaves the named entries out. OR_EQUAL_IDS adds them again.
        if isinstance(equal, EqualIds) and equal.but is beside:
            named = members(equal, cols, device)
            return None if named is None else replace(named, ids=OR_EQUAL_IDS)
    return None


def _named_members(rows: Tensor) -> Members | None:
    return Members(rows) if len(rows) <= _NAMES else None


@lru_cache(maxsize=64)
def _rows_on_diagonals(diagonals: tuple[Diagonal, ...], cols: int, device: torch.device) -> Tensor:
    """Return each column's rows on diagonals, (k, B), int32; those of diagonals without a common column are one row.

    They are made once for all calls of a form. A call must not change them.
    """
    rows: list[tuple[Tensor, list[Diagonal]]] = []
    for diagonal in diagonals:
        start, end = diagonal.col, diagonal.col + diagonal.length
        apart = (row for row in rows if all(start >= b.col + b.length or b.col >= end for b in row[1]))
        named, others = next(apart, (torch.full((cols,), -1, dtype=torch.int32, device=device), []))
        torch.arange(diagonal.row, diagonal.row + diagonal.length, out=named[start:end])
        others.append(diagonal)
        if len(others) == 1:
            rows.append((named, others))
    return torch.stack([named for named, _ in rows])


def _number_ids(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids as int32: the place of each in the sorted list of all. No count is read back from the device.

    >>> _number_ids(torch.tensor([2**40, 5]), torch.tensor([5, 7, 2**40]))
    (tensor([3, 0], dtype=torch.int32), tensor([0, 2, 3], dtype=torch.int32))
    """
    in_order = torch.cat([rows, cols]).sort().values
    found_rows, found_cols = (torch.searchsorted(in_order, x.contiguous(), out_int32=True) for x in (rows, cols))
    return found_rows, found_cols
