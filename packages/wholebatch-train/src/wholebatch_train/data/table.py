"""A table of examples: named columns of Arrow, mapped into memory, so that all ranks share its pages; and such columns:
few types for many, lists of texts, the texts of a column as numbers, and a hash of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from wholebatch.app import UserError

LINE = "\0line"
"""The column with the line of a text file that a row was read from. No column of a user's has this name."""
MEMBER = "\0member"
"""The column with the name of a row's picture in a folder, or with that of a tar file and of a member of it."""
REASON = "\0reason"
"""The column with the reason why a row has no text, or no values at all; null for others."""
ROW = "\0row"
"""The column with the number, from 1, of the row of several texts that a row with one of them comes from."""
UNUSABLE = b"unusable"
"""The key of a field's metadata under which stands why the column has no role."""


@dataclass(frozen=True)
class Table:
    """Rows by number."""

    source: Path
    """What the user named; messages begin with it."""
    arrow: pa.Table
    folder: Path
    """Relative paths of pictures start here."""
    said: tuple[str, ...] = ()
    """Lines about how the data were understood."""
    files: tuple[Path, ...] = ()
    """The files that the rows come from; () for a folder, whose rows name them."""

    def __len__(self) -> int:
        return int(self.arrow.num_rows)

    @property
    def names(self) -> list[str]:
        """The user's columns."""
        return [name for name in self.arrow.column_names if not name.startswith("\0")]

    def where(self, row: int) -> str:
        """Return the place of a row in words: "pairs.csv, line 17", "photos/7.png", "shards/000.tar, 7.png"."""
        if LINE in self.arrow.column_names:
            return f"{self.source}, line {self.arrow[LINE][row].as_py()}"
        if MEMBER in self.arrow.column_names:  # in a folder of pictures or of shards, or beside the shard that is named
            folder = self.source.parent if self.source.suffix == ".tar" else self.source
            return str(folder / self.arrow[MEMBER][row].as_py())
        number = self.arrow[ROW][row].as_py() if ROW in self.arrow.column_names else row + 1
        return f"{self.source}, row {number}"

    def why_empty(self, row: int, role: str, name: str) -> str:
        noted = self.arrow[REASON][row].as_py() if REASON in self.arrow.column_names else None
        return noted or f"the {role}, column {name!r}, is empty"

    def check_usable(self, name: str) -> None:
        """Raise UserError if a column holds values that are neither texts nor lists of texts."""
        reason = (self.arrow.schema.field(name).metadata or {}).get(UNUSABLE)
        if reason is not None:
            raise UserError(
                f"{self.source}: the column {name!r} must hold a text in each line, or a list of texts in each line; "
                f"{reason.decode()}"
            )


def plain_type(kind: Any) -> Any:
    """Return a type of the same values that is read here; other types, such as numbers, are returned as they are.

    Dictionaries become their values, views and fixed sizes of bytes the usual types; also inside of lists and structs.
    Bytes of views become `large_binary`, because those of a batch may be more than 2 GiB.
    """
    is_type = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if is_type.is_dictionary(kind):
        return plain_type(kind.value_type)
    if is_type.is_string_view(kind):
        return pa.string()
    if is_type.is_binary_view(kind):
        return pa.large_binary()
    if is_type.is_fixed_size_binary(kind):
        return pa.binary()
    if is_type.is_struct(kind):
        return pa.struct([_plain_field(kind.field(place)) for place in range(kind.num_fields)])
    if is_type.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if is_type.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if is_type.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    return kind


def plain_schema(schema: Any) -> Any:
    """Return the schema with plain types, and the same metadata."""
    return pa.schema([_plain_field(field) for field in schema], schema.metadata)


def _plain_field(field: Any) -> Any:
    return field.with_type(plain_type(field.type))


def is_text(kind: Any) -> bool:
    """Return whether a plain type is one of texts."""
    is_type = pa.types
    return bool(is_type.is_string(kind) or is_type.is_large_string(kind))


def is_bytes(kind: Any) -> bool:
    """Return whether a plain type is one of bytes."""
    is_type = pa.types
    return bool(is_type.is_binary(kind) or is_type.is_large_binary(kind))


def is_list(kind: Any) -> bool:
    """Return whether a plain type is one of lists."""
    is_type = pa.types
    return bool(is_type.is_list(kind) or is_type.is_large_list(kind) or is_type.is_fixed_size_list(kind))


def flattened(column: Any) -> tuple[Any, Tensor]:
    """Return the values of a column of lists and the row of each, int64; of another column itself and all rows."""
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


def text_codes(column: Any) -> tuple[Any, Tensor]:
    """Return the distinct texts in the order of their first rows, and the place of each row's among them, or -1."""
    column = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    codes = column.dictionary_encode()  # chunks share one dictionary
    distinct = codes.chunk(0).dictionary if codes.num_chunks else pa.array([], column.type)
    parts = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype("int64") for chunk in codes.chunks]
    return distinct, torch.cat([torch.empty(0, dtype=torch.int64), *(torch.from_numpy(part) for part in parts)])


def digest_of(*parts: str | Tensor | Any) -> str:
    """Return a hash of these parts, in order: words, tensors, and Arrow arrays of texts.

    Texts count by their letters alone, not by the way in which a file or its reader has arranged them.
    """
    hasher = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            hasher.update(f"{len(part)} {part}".encode())
        elif isinstance(part, Tensor):
            hasher.update(f"{part.dtype} {tuple(part.shape)}".encode())
            hasher.update(part.contiguous().numpy().data if part.numel() else b"")
        else:
            _update(hasher, part)
    return hasher.hexdigest()


def _update(hasher: Any, texts: Any) -> None:
    distinct, codes = text_codes(texts)
    lengths = pc.binary_length(distinct).cast(pa.int64()).to_numpy(zero_copy_only=False)
    hasher.update(f"{len(codes)} {len(distinct)}".encode())
    hasher.update(lengths.tobytes())
    _, ends, letters = distinct.buffers()
    if letters is not None:
        is_large = pa.types.is_large_string(distinct.type) or pa.types.is_large_binary(distinct.type)
        ends = np.frombuffer(ends, np.int64 if is_large else np.int32)
        first = int(ends[distinct.offset])
        hasher.update(letters.slice(first, int(lengths.sum())))
    hasher.update(codes.numpy().tobytes())
