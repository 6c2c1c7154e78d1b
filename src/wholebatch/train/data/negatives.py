"""Mined negatives: for each row any number of texts that are not its positive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._user_error import UserError
from .table import Table


class Negatives:
    """Texts of each row, `texts[first[row] : first[row + 1]]`, and a number of each text.

    Args:
        texts: an Arrow column of all rows' negatives, one below the other.
        first: int64, (number of rows + 1,).
        numbers: int64, (number of texts,), equal for equal texts, and equal to that of an equal positive.
    """

    def __init__(self, texts: Any, first: Tensor, numbers: Tensor) -> None:
        self._texts, self._first, self._numbers = texts, first, numbers

    def of(self, rows: Tensor) -> tuple[list[str], Tensor]:
        """Return the texts of these rows, one row after another, and their numbers."""
        places = torch.cat([torch.arange(int(self._first[row]), int(self._first[row + 1])) for row in rows.tolist()])
        return [self._texts[place].as_py() for place in places.tolist()], self._numbers[places]

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._numbers)


def find_negatives(table: Table, names: list[str], positives: Any) -> tuple[Negatives, Tensor]:
    """Return the negatives in one column of lists, or in one or more columns of texts, and the positives' numbers.

    Null and empty texts are left out.

    Raises:
        UserError: a column of another type.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = [table.arrow[name].combine_chunks() for name in names]
    columns = [pa.concat_arrays(c.chunks) if isinstance(c, pa.ChunkedArray) else c for c in columns]
    rows, texts = [], []
    for name, column in zip(names, columns, strict=True):
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            rows.append(pc.list_parent_indices(column))
            column = pc.list_flatten(column)
        else:
            rows.append(pa.array(range(len(column))))
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise UserError(
                f"{table.source}: the column {name!r} must hold texts, or lists of texts, to be the negatives; "
                f"got {table.arrow[name].type}"
            )
        texts.append(pc.utf8_trim_whitespace(column).cast(pa.string()))
    flat, owner = (
        pa.concat_arrays(texts),
        torch.cat([torch.tensor(each.to_pylist(), dtype=torch.int64) for each in rows]),
    )
    there = torch.tensor(pc.fill_null(pc.not_equal(flat, ""), False).to_pylist(), dtype=torch.bool)
    order = owner.argsort(stable=True)
    order = order[there[order]]
    flat, owner = flat.take(pa.array(order.numpy())), owner[order]
    counts = torch.bincount(owner, minlength=len(table))
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    both = pa.chunked_array([*[chunk.cast(pa.string()) for chunk in positives.chunks], flat]).combine_chunks()
    codes = both.dictionary_encode() if not isinstance(both, pa.ChunkedArray) else both.chunk(0).dictionary_encode()
    numbers = torch.tensor(codes.indices.to_pylist(), dtype=torch.int64)
    return Negatives(flat, first, numbers[len(table) :]), numbers[: len(table)]
