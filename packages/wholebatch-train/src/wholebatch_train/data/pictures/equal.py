"""Which pictures are equal, byte by byte, so that none of them stands on both sides of the held-out split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wholebatch.app import UserError

from ..sides import FilePictures
from ..tables.columns import is_text, text_codes
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
        of_number[numbers[first]] = _sizes(side, first)
        sizes = torch.where(numbers < 0, -1, of_number[numbers.clamp(min=0)])
    else:
        numbers, first = torch.arange(len(column)), rows
        sizes = torch.full_like(numbers, -1)
        sizes[rows] = _sizes(side, rows)
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


def _sizes(side: FilePictures, rows: Tensor) -> Tensor:
    return torch.tensor([side.size(row) for row in rows.tolist()], dtype=torch.int64)


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
