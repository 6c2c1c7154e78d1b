"""Mined negatives: for each row any number of texts that are not its positive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._user_error import UserError
from .equal_pictures import is_text, numbers_of_texts
from .table import Table


class Negatives:
    """Texts of each row, `texts[first[row] : first[row + 1]]`, and a number of each text.

    Args:
        texts: an Arrow column of all rows' negatives, one below the other.
        first: int64, (number of rows + 1,).
        numbers: int64, (number of texts,), equal for equal texts; of a positive's text, that of the positive's group.
    """

    def __init__(self, texts: Any, first: Tensor, numbers: Tensor) -> None:
        self.texts, self.first, self._numbers = texts, first, numbers

    def of(self, rows: Tensor) -> tuple[list[str], Tensor]:
        """Return the texts of these rows, one row after another, and their numbers."""
        places = torch.cat([torch.arange(int(self.first[row]), int(self.first[row + 1])) for row in rows.tolist()])
        return [self.texts[place].as_py() for place in places.tolist()], self._numbers[places]

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._numbers)


def find_negatives(table: Table, names: list[str], positives: Any, group: Tensor) -> Negatives:
    """Return the negatives in one column of lists, or in one or more columns of texts.

    Null and empty texts are left out.

    Args:
        table: the data.
        names: the columns.
        positives: the column of the positives.
        group: the number of each row's group, (n,): rows with an equal positive are in one group.

    Raises:
        UserError: a column of another type.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows, texts = [], []
    for name in names:
        table.check_usable(name)
        column = table.arrow[name]
        if _is_list(column.type):
            counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
            owner = torch.repeat_interleave(torch.arange(len(column)), torch.from_numpy(counts.astype("int64")))
            column = pc.list_flatten(column)
        else:
            owner = torch.arange(len(column))
        if not is_text(column.type):
            raise UserError(
                f"{table.source}: the column {name!r} must hold texts, or lists of texts, to be the negatives; "
                f"got {table.arrow[name].type}"
            )
        rows.append(owner)
        texts.append(pc.utf8_trim_whitespace(column).cast(pa.large_string()))
    flat = pa.chunked_array([chunk for column in texts for chunk in column.chunks], pa.large_string())
    owner = torch.cat(rows)
    there = torch.from_numpy(pc.fill_null(pc.not_equal(flat, ""), False).to_numpy().astype("bool"))
    order = owner.argsort(stable=True)
    order = order[there[order]]
    flat, owner = flat.take(pa.array(order.numpy())), owner[order]
    counts = torch.bincount(owner, minlength=len(table))
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    both = [*positives.cast(pa.large_string()).chunks, *flat.chunks]
    numbers = numbers_of_texts(pa.chunked_array(both, pa.large_string()))
    of_text = int(group.max()) + 1 + torch.arange(int(numbers.max()) + 1)  # no group has these numbers
    of_text[numbers[: len(table)]] = group
    return Negatives(flat, first, of_text[numbers[len(table) :]])


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
