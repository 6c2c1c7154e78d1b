"""Sets of entries as kernels test them: by rows that columns name, and by ids. No list is made of the entries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..partition import Tile
from .pairs import Diagonals, Entries, EqualIds, NamedRows, Union

NO_IDS, OR_EQUAL_IDS, EQUAL_IDS_BUT = range(3)  # as in `kernels.tiles.common`
_NAMES = 4  # of a column, that a kernel knows


@dataclass(frozen=True)
class Members:
    """A set of entries of this rank's rows and the global batch's columns.

    Args:
        named: (k, B), int32, the rows that each column names, -1 where it names none; None without.
        ids: whether entries with equal ids are in it beside them, or are it but for them; or none are.
        rows, cols: ids, int32; None without.
    """

    named: Tensor | None = None
    ids: int = NO_IDS
    rows: Tensor | None = None
    cols: Tensor | None = None

    def of_tile(self, tile: Tile) -> kernels.Entries:
        """Those of a tile, as a kernel takes them."""
        named = None if self.named is None else self.named[:, tile.cols]
        rows = None if self.rows is None else self.rows[tile.rows]
        return kernels.Entries(named, self.ids, rows, None if self.cols is None else self.cols[tile.cols])


def members(entries: Entries, cols: int, device: torch.device) -> Members | None:
    """A set in this form; None if it has none.

    Args:
        entries: the set.
        cols: how many columns the global batch has.
        device: of the features.

    >>> members(NamedRows(torch.tensor([2, -1, 1])), 3, torch.device("cpu")).named
    tensor([[ 2, -1,  1]], dtype=torch.int32)
    """
    if isinstance(entries, Diagonals):
        return _naming(_on_diagonals(entries, cols, device)) if entries.diagonals else Members()
    if isinstance(entries, NamedRows):
        return _naming(entries.rows.T.to(device, torch.int32).contiguous())
    if isinstance(entries, EqualIds):
        but = Members() if entries.but is None else members(entries.but, cols, device)
        if but is None or but.ids != NO_IDS:
            return None
        return Members(but.named, EQUAL_IDS_BUT, *_numbered(entries.rows, entries.cols))
    if isinstance(entries, Union) and len(entries.sets) == 2:
        beside, equal = entries.sets
        # No entry is in both sets of a union: what is named is left out of the equal ids beside it.
        if isinstance(equal, EqualIds) and equal.but is beside:
            found = members(equal, cols, device)
            return None if found is None else replace(found, ids=OR_EQUAL_IDS)
    return None


def _naming(rows: Tensor) -> Members | None:
    return Members(rows) if len(rows) <= _NAMES else None


def _on_diagonals(entries: Diagonals, cols: int, device: torch.device) -> Tensor:
    """Each column's row on each of them, (k, B), int32."""
    named = torch.full((len(entries.diagonals), cols), -1, dtype=torch.int32, device=device)
    for of_diagonal, at in zip(named, entries.diagonals, strict=True):
        rows = torch.arange(at.row, at.row + at.length, dtype=torch.int32, device=device)
        of_diagonal[at.col : at.col + at.length] = rows
    return named


def _numbered(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Ids as int32: each one's place among all of them in order, which takes no count that a host would wait for.

    >>> _numbered(torch.tensor([2**40, 5]), torch.tensor([5, 7, 2**40]))
    (tensor([3, 0], dtype=torch.int32), tensor([0, 2, 3], dtype=torch.int32))
    """
    in_order = torch.cat([rows, cols]).sort().values
    found_rows, found_cols = (torch.searchsorted(in_order, of.contiguous(), out_int32=True) for of in (rows, cols))
    return found_rows, found_cols
