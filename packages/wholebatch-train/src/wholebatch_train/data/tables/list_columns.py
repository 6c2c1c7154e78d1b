"""Columns of lists of texts, such as the captions of a picture or the documents of a query: a row for each text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.app import UserError

from .plain_types import is_bytes, is_text
from .table import ROW, Table, need_pyarrow


def is_list(kind: Any) -> bool:
    """Return whether a plain type is one of lists."""
    is_type = need_pyarrow().types
    return bool(is_type.is_list(kind) or is_type.is_large_list(kind) or is_type.is_fixed_size_list(kind))


def flattened(column: Any) -> tuple[Any, Tensor]:
    """Return the values of a column of lists and the row of each, int64; of another column itself and all rows."""
    import pyarrow.compute as pc

    rows = torch.arange(len(column))
    if not is_list(column.type):
        return column, rows
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype("int64")
    return pc.list_flatten(column), rows.repeat_interleave(torch.from_numpy(counts))


def in_rows(table: Table, names: Sequence[str]) -> tuple[Table, Tensor | None]:
    """Return a table with a row for each text of the column that holds lists of texts, and the row that it comes from.

    Empty texts and columns of pictures are left out; null in a list, and a row without a text, stay null. Where no
    column of `names` has lists, the table as it is and None; UserError where two have.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = {name: table.arrow.schema.field(name).type for name in names}
    lists = [name for name, kind in kinds.items() if is_list(kind) and is_text(kind.value_type)]
    if not lists:
        return table, None
    if len(lists) > 1:
        raise UserError(f"{table.source}: only one of the columns {' and '.join(lists)} may hold lists of texts")
    texts, owner = flattened(table.arrow[lists[0]])
    is_there = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(texts), ""), True)
    texts, owner = texts.filter(is_there), owner[torch.from_numpy(is_there.to_numpy().astype("bool"))]
    without = (torch.bincount(owner, minlength=len(table)) == 0).nonzero()[:, 0]
    texts = pa.chunked_array([*texts.chunks, pa.nulls(len(without), texts.type)])
    owner, order = torch.cat([owner, without]).sort(stable=True)
    arrow = table.arrow.append_column(ROW, pa.array(range(1, len(table) + 1), pa.int64()))
    arrow = arrow.select([f.name for f in arrow.schema if not (is_bytes(f.type) or pa.types.is_struct(f.type))])
    arrow = arrow.take(pa.array(owner.numpy()))
    place = arrow.column_names.index(lists[0])
    return replace(table, arrow=arrow.set_column(place, lists[0], texts.take(pa.array(order.numpy())))), owner
