"""Which pictures are equal, byte by byte, so that none of them stands on both sides of the held-out split."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wholebatch.app import UserError

from ..sides import FilePictures
from ..tables.columns import is_bytes, is_text, text_codes
from .reading import bytes_of

_READERS = 16  # threads
_ROWS = 256  # that each of them gets at a time
MOST = 200_000
"""Beyond so many pictures of equal sizes, their bytes are not compared: a start must not read millions of files."""


class Numbered(NamedTuple):
    """Numbers of pictures."""

    numbers: Tensor
    """int64, (n,), equal for equal pictures."""
    sizes: Tensor
    """int64, (n,), in bytes; -1 where nothing was asked."""
    said: str
    """A line where bytes were not compared."""


def numbers_of_pictures(side: FilePictures, rows: Tensor | None = None) -> Numbered:
    """Return a number for each row, equal for equal pictures.

    Pictures of different sizes differ, so only those of equal sizes are read. A path named twice is one picture.

    Args:
        side: the pictures.
        rows: the rows that count; None: all.
    """
    column = side.table.arrow[side.column]
    rows = torch.arange(len(column)) if rows is None else rows
    if is_text(column.type):
        _refuse_addresses(side, column, rows)
        numbers = numbers_of_texts(column)
        first = rows[first_of_each(torch.unique(numbers[rows], return_inverse=True)[1])]
        if len(first) > MOST:
            said = f"{len(first):,} pictures: equal ones under two names were not looked for"
            return Numbered(numbers, torch.full_like(numbers, -1), said)
        of_number = torch.full((int(numbers.max()) + 1,), -1)
        of_number[numbers[first]] = torch.tensor(_sizes_of_files(side, first))
        sizes = torch.where(numbers < 0, -1, of_number[numbers.clamp(min=0)])
    else:
        numbers, first = torch.arange(len(column)), rows
        sizes = torch.full_like(numbers, -1)
        sizes[rows] = torch.tensor(_sizes(side, column, rows), dtype=torch.int64)
    return _merge_equal(side, numbers, first, sizes)


def numbers_of_texts(column: Any) -> Tensor:
    """Return a number for each row of a column of texts, int64 (n,), equal for equal texts; -1 for null."""
    return text_codes(column)[1]


def numbers_in_common(columns: Sequence[Any], identity: Callable[[str], str] | None = None) -> list[Tensor]:
    """Return a number for each row of each column of texts, int64, equal for texts of any of them of one `identity`."""
    import pyarrow as pa

    is_large = any(pa.types.is_large_string(column.type) for column in columns)
    kind = pa.large_string() if is_large else pa.string()
    chunks = [chunk for column in columns for chunk in column.cast(kind).chunks]
    distinct, numbers = text_codes(pa.chunked_array(chunks, kind))
    if identity is not None and len(distinct):
        same = numbers_of_texts(pa.array([identity(text.as_py()) for text in distinct], kind))
        numbers = torch.where(numbers < 0, numbers, same[numbers])
    return [*numbers.split([len(column) for column in columns])]


def first_of_each(numbers: Tensor) -> Tensor:
    """Return the first row of each number, in ascending order of the numbers, of which none is left out from 0 on."""
    count = int(numbers.max()) + 1
    return torch.full((count,), len(numbers)).scatter_reduce(0, numbers, torch.arange(len(numbers)), "amin")


def _refuse_addresses(side: FilePictures, column: Any, rows: Tensor) -> None:
    import pyarrow.compute as pc

    wrong = torch.from_numpy(
        pc.fill_null(pc.match_substring_regex(column, "^https?://"), False).to_numpy().astype("bool")
    )[rows]
    if wrong.any():
        where = side.table.where(int(rows[wrong][0]))
        raise UserError(f"{where}: an address is no picture; download the pictures first")


def _sizes_of_files(side: FilePictures, rows: Tensor) -> list[int]:
    """Return the sizes of the files that a column of paths names in these rows."""
    import pyarrow as pa

    folder, paths = str(side.table.folder), side.table.arrow[side.column].take(pa.array(rows.numpy()))
    sizes = []
    for row, path in zip(rows.tolist(), paths.to_pylist(), strict=True):
        size = None
        if path and path.strip():
            with suppress(OSError, ValueError):
                size = os.stat(os.path.join(folder, path)).st_size
        sizes.append(_size(side, row) if size is None else size)  # which says why there is none
    return sizes


def _place(side: FilePictures, row: int) -> Any:
    try:
        return side.place(row)
    except UserError as error:
        raise UserError(f"{error}; --skip-bad leaves such rows out") from error


def _size(side: FilePictures, row: int) -> int:
    path: Path = _place(side, row)
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise UserError(f"{side.missing(row)}; --skip-bad leaves such rows out") from error
    except OSError as error:
        raise side.refused(row, error) from error


def _sizes(side: FilePictures, column: Any, rows: Tensor) -> list[int]:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    names = [kind.field(i).name for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []
    if "shard" in names:
        lengths = pc.struct_field(column, "size")
    elif "bytes" in names:
        content = pc.struct_field(column, "bytes")
        lengths = [None] * len(column) if pa.types.is_null(content.type) else pc.binary_length(content)
    elif is_bytes(kind):
        lengths = pc.binary_length(column)
    else:
        raise UserError(
            f"{side.table.source}: the column {side.column!r} must hold paths or bytes of pictures to be the image; "
            f"got {kind}"
        )
    sizes = lengths if isinstance(lengths, list) else lengths.to_pylist()
    return [sizes[row] or _size_of_place(side, row) for row in rows.tolist()]


def _size_of_place(side: FilePictures, row: int) -> int:
    place = _place(side, row)
    return len(place) if isinstance(place, bytes) else place[2] if isinstance(place, tuple) else _size(side, row)


def _merge_equal(side: FilePictures, numbers: Tensor, first: Tensor, sizes: Tensor) -> Numbered:
    """Give the same number to pictures of equal bytes; `first` has a row of each number that counts."""
    _, of_size, count = torch.unique(sizes[first], return_inverse=True, return_counts=True)
    alike = first[count[of_size] > 1]
    if len(alike) > MOST:
        said = f"{len(first):,} pictures, many of equal sizes: equal ones in two rows were not looked for"
        return Numbered(numbers, sizes, said)
    known: dict[bytes, int] = {}
    changed = torch.arange(int(numbers.max()) + 1)
    for number, digest in zip(numbers[alike].tolist(), digests_of(side, alike), strict=True):
        changed[number] = known.setdefault(digest, number)
    return Numbered(torch.where(numbers < 0, numbers, changed[numbers.clamp(min=0)]), sizes, "")


def digests_of(side: FilePictures, rows: Tensor) -> Iterator[bytes]:
    """Yield a digest of the bytes of each of these pictures, in order."""
    with ThreadPoolExecutor(_READERS) as readers:  # reading and hashing leave the interpreter to others
        for some in rows.split(_READERS * _ROWS):
            for part in readers.map(lambda each: [_digest(side, row) for row in each.tolist()], some.split(_ROWS)):
                yield from part


def _digest(side: FilePictures, row: int) -> bytes:
    place = side.place(row)
    try:
        content = bytes_of(place)
    except OSError as error:
        raise side.refused(row, error) from error
    return hashlib.sha256(content).digest()
