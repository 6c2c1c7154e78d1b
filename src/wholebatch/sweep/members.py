"""Sets of entries as kernels test them: by ids of rows and columns, and by diagonals. No list is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..partition import Diagonal, Tile
from .pairs import Diagonals, Entries, EqualIds, Union

NO_IDS, OR_EQUAL_IDS, EQUAL_IDS_BUT = range(3)  # as `kernels.softmax_tiles` has them
_DIAGONALS = 2  # that a kernel knows


@dataclass(frozen=True)
class Members:
    """A set of entries of this rank's rows and the global batch's columns.

    Args:
        diagonals: two at most.
        ids: whether entries with equal ids are in it beside them, or are it but for them; or none are.
        rows, cols: ids, int32; None without.
    """

    diagonals: tuple[Diagonal, ...] = ()
    ids: int = NO_IDS
    rows: Tensor | None = None
    cols: Tensor | None = None

    def of_tile(self, tile: Tile, nothing: Tensor) -> kernels.Entries:
        """Those of a tile, as a kernel takes them; `nothing` stands for ids that there are none of."""
        found: list[Any] = [nothing if self.rows is None else self.rows[tile.rows]]
        found.append(nothing if self.cols is None else self.cols[tile.cols])
        for at in range(_DIAGONALS):
            diagonal = self.diagonals[at] if at < len(self.diagonals) else Diagonal(0, 0, 0)
            found += [diagonal.row - tile.rows.start, diagonal.col - tile.cols.start, diagonal.length]
        return kernels.Entries(len(self.diagonals), self.ids, found)


def members(entries: Entries) -> Members | None:
    """A set in this form; None if it has none.

    >>> members(Diagonals(Diagonal(0, 2, 3)))
    Members(diagonals=(Diagonal(row=0, col=2, length=3),), ids=0, rows=None, cols=None)
    """
    if isinstance(entries, Diagonals):
        return Members(entries.diagonals) if len(entries.diagonals) <= _DIAGONALS else None
    if isinstance(entries, EqualIds):
        but = Members() if entries.but is None else members(entries.but)
        if but is None or but.ids != NO_IDS:
            return None
        return Members(but.diagonals, EQUAL_IDS_BUT, *_numbered(entries.rows, entries.cols))
    if isinstance(entries, Union):
        return _either([members(part) for part in entries.sets])
    return None


def _either(parts: list[Members | None]) -> Members | None:
    """Diagonals beside equal ids, from which the same diagonals may have been left out."""
    if len(parts) != 2 or parts[0] is None or parts[1] is None:
        return None
    diagonals, ids = sorted(parts, key=lambda part: part is not None and part.ids)
    assert diagonals is not None
    assert ids is not None
    if diagonals.ids != NO_IDS or ids.ids != EQUAL_IDS_BUT or not set(ids.diagonals) <= set(diagonals.diagonals):
        return None
    return Members(diagonals.diagonals, OR_EQUAL_IDS, ids.rows, ids.cols)


def _numbered(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Ids as int32: each one's place among all of them in order, which takes no count that a host would wait for.

    >>> _numbered(torch.tensor([2**40, 5]), torch.tensor([5, 7, 2**40]))
    (tensor([3, 0], dtype=torch.int32), tensor([0, 2, 3], dtype=torch.int32))
    """
    in_order = torch.cat([rows, cols]).sort().values
    found_rows, found_cols = (torch.searchsorted(in_order, of.contiguous(), out_int32=True) for of in (rows, cols))
    return found_rows, found_cols
