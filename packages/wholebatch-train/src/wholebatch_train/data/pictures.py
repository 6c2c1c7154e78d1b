"""A user's pictures: which are equal, byte by byte, and which `--skip-bad` leaves out because they cannot be read.

Equal pictures never stand on both sides of the held-out split. The cache keeps both results, until a file changes, or
Pillow does. Pictures that cannot be read are tried again at each start: what the system refuses, such as a file without
permission or a disk that is not there, may pass without a change of any file.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from wholebatch.app import UserError, cpus_of_a_rank, replacing

from .cache import Tensors, kept
from .loader import WorkerDiedError, prepared
from .reading import bytes_of
from .sides import FilePictures
from .table import Table, digest_of, is_text, text_codes

_READERS = 16  # threads
_ROWS = 256  # that a thread, or a worker, gets at a time
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
    """
    column = side.table.arrow[side.column]
    rows = torch.arange(len(column)) if rows is None else rows
    if is_text(column.type):
        _refuse_addresses(side, column, rows)
        numbers = text_codes(column)[1]
        first = rows[first_of_each(torch.unique(numbers[rows], return_inverse=True)[1])]
        if len(first) > MOST:
            said = f"{len(first):,} pictures: equal ones under two names were not looked for"
            return Numbered(numbers, torch.full_like(numbers, -1), said)
        size_of_number = torch.full((int(numbers.max()) + 1,), -1)
        size_of_number[numbers[first]] = _sizes(side, first)
        sizes = torch.where(numbers < 0, -1, size_of_number[numbers.clamp(min=0)])
    else:
        numbers, first = torch.arange(len(column)), rows
        sizes = torch.full_like(numbers, -1)
        sizes[rows] = _sizes(side, rows)
    return _merge_equal(side, numbers, first, sizes)


def kept_numbers(side: FilePictures, rows: Tensor) -> Numbered:
    """Return `numbers_of_pictures`, of now or of an earlier start with the same files."""
    column = side.table.arrow[side.column]
    if is_text(column.type) and len(column.unique()) > MOST:  # not even the files' sizes are looked at
        return numbers_of_pictures(side, rows)

    def find() -> Tensors:
        numbers, sizes, said = numbers_of_pictures(side, rows)
        return {"numbers": numbers, "sizes": sizes, "said": torch.tensor([*said.encode()], dtype=torch.uint8)}

    result = kept(side, digest_of(rows), ".pictures", find)
    return Numbered(result["numbers"], result["sizes"], bytes(result["said"].tolist()).decode())


def numbers_in_common(columns: Sequence[Any], identity: Callable[[str], str] | None = None) -> list[Tensor]:
    """Return a number for each row of each column of texts, int64, equal for texts of any of them of one `identity`."""
    is_large = any(pa.types.is_large_string(column.type) for column in columns)
    kind = pa.large_string() if is_large else pa.string()
    chunks = [chunk for column in columns for chunk in column.cast(kind).chunks]
    distinct, numbers = text_codes(pa.chunked_array(chunks, kind))
    if identity is not None and len(distinct):
        same = text_codes(pa.array([identity(text.as_py()) for text in distinct], kind))[1]
        numbers = torch.where(numbers < 0, numbers, same[numbers])
    return [*numbers.split([len(column) for column in columns])]


def first_of_each(numbers: Tensor) -> Tensor:
    """Return the first row of each number, in ascending order of the numbers, of which none is left out from 0 on."""
    count = int(numbers.max()) + 1
    return torch.full((count,), len(numbers)).scatter_reduce(0, numbers, torch.arange(len(numbers)), "amin")


def _refuse_addresses(side: FilePictures, column: Any, rows: Tensor) -> None:
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
    _, size_index, count = torch.unique(sizes[first], return_inverse=True, return_counts=True)
    alike = first[count[size_index] > 1]
    if len(alike) > MOST:
        said = f"{len(first):,} pictures, many of equal sizes: equal ones in two rows were not looked for"
        return Numbered(numbers, sizes, said)
    known: dict[bytes, int] = {}
    changed = torch.arange(int(numbers.max()) + 1)
    for number, digest in zip(numbers[alike].tolist(), digests_of(side, alike), strict=True):
        changed[number] = known.setdefault(digest, number)
    return Numbered(torch.where(numbers < 0, numbers, changed[numbers.clamp(min=0)]), sizes, "")


def digests_of(side: FilePictures, rows: Tensor) -> Iterator[bytes]:
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


_MOST_WORKERS = 32
FILE = "left_out.csv"
_SHOWN = 5


def readable_rows(
    side: FilePictures, say: Callable[[str], None], *, workers: int, said: Sequence[LeftOut] = ()
) -> tuple[Tensor, tuple[LeftOut, ...]]:
    """Return the rows whose picture can be read, and the others, whose number is said, and the first of them."""
    import PIL

    workers = workers if workers >= 0 else min(_MOST_WORKERS, cpus_of_a_rank(1))
    count = len(side.table)

    def find() -> Tensors:
        say(f"--skip-bad: reading all {count:,} pictures, once")
        return {"bad": torch.tensor([row for row, _ in _find(side, torch.arange(count), workers)], dtype=torch.int64)}

    def not_kept(error: OSError) -> None:
        say(f"--skip-bad reads all pictures at each start: the cache cannot be written ({error.strerror or error})")

    result = kept(side, f"Pillow {PIL.__version__}", ".unreadable", find, not_kept)
    bad = _find(side, result["bad"], workers if len(result["bad"]) > _ROWS else 0)
    left_out = tuple(LeftOut(side.table.where(row), reason) for row, reason in bad)
    if len(bad) == count:
        raise UserError(f"none of the {count} pictures of --data can be read; the first: {left_out[0]}")
    places = {each.place for each in said}
    say_left_out([each for each in left_out if each.place not in places], count, "their picture cannot be read", say)
    is_readable = torch.ones(count, dtype=torch.bool)
    is_readable[[row for row, _ in bad]] = False
    return is_readable.nonzero()[:, 0], left_out


def _find(side: FilePictures, rows: Tensor, workers: int) -> list[tuple[int, str]]:
    """Return those of these rows that cannot be read, in order, and why."""
    parts = prepared(partial(_mistakes, side), [*rows.split(_ROWS)], workers=workers)
    try:
        return [each for part in parts for each in part]
    except WorkerDiedError as error:
        raise UserError(f"--skip-bad: a process that reads the pictures {error}") from error


def _mistakes(side: FilePictures, rows: Tensor) -> list[tuple[int, str]]:
    """Return those of some rows that cannot be read, and why; it runs in a worker."""
    bad = []
    for row in rows.tolist():
        try:
            side.read(row)
        except UserError as error:
            bad.append((row, str(error).removeprefix(f"{side.table.where(row)}: ")))
    return bad


class LeftOut(NamedTuple):
    """A row that is left out."""

    place: str
    """The file, and the line or the member."""
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


def rows_with_texts(
    table: Table, empty: Mapping[int, str], say: Callable[[str], None]
) -> tuple[Tensor, tuple[LeftOut, ...]]:
    """Return the rows that are not `empty`, and the others, whose number is said; UserError if all are empty."""
    left_out = tuple(LeftOut(table.where(row), reason) for row, reason in empty.items())
    say_left_out(left_out, len(table), "they have no text that can be read", say)
    is_there = torch.ones(len(table), dtype=torch.bool)
    is_there[[*empty]] = False
    if left_out and not is_there.any():
        raise UserError(f"none of the {len(table)} rows of --data has a text; the first: {left_out[0]}")
    return is_there.nonzero()[:, 0], left_out


def say_left_out(rows: Sequence[LeftOut], count: int, reason: str, say: Callable[[str], None]) -> None:
    if rows:
        say(f"{len(rows):,} of {count:,} rows are left out, because {reason}:")
        for each in rows[:_SHOWN]:
            say(f"  {each}")
        if len(rows) > _SHOWN:
            say(f"  and {len(rows) - _SHOWN:,} more")


def write_left_out(folder: Path, rows: Sequence[LeftOut]) -> None:
    """Write the file, with the columns place and reason; or OSError."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([LeftOut._fields, *rows])
    with replacing(folder / FILE) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))  # a path may hold any bytes
