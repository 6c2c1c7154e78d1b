"""`--skip-bad`: rows whose picture cannot be read, found by reading all of them once, in worker processes.

The cache keeps which rows these are, until a file changes, or Pillow does. They are tried again at each start: what the
system refuses, such as a file without permission or a disk that is not there, may pass without a change of any file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wholebatch.app import UserError, cpus_of_a_rank, replacing

from ..cache.kept_results import Tensors, kept
from ..loader import WorkerDiedError, prepared
from ..sides import FilePictures
from ..tables.table import Table

_ROWS = 256  # that a worker reads at a time
_MOST_WORKERS = 32
FILE = "left_out.csv"
_SHOWN = 5


def readable_rows(
    side: FilePictures, say: Callable[[str], None], *, workers: int, said: Sequence[LeftOut] = ()
) -> tuple[Tensor, tuple[LeftOut, ...]]:
    """Return the rows whose picture can be read, and the others, whose number is said, and the first of them.

    Args:
        side: the pictures.
        say: called with lines.
        workers: processes that read; -1: as many as there are CPUs, at most 32.
        said: rows that have been said to be left out.
    """
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
    parts = prepared(_Mistakes(side), [*rows.split(_ROWS)], workers=workers)
    try:
        return [each for part in parts for each in part]
    except WorkerDiedError as error:
        raise UserError(f"--skip-bad: a process that reads the pictures {error}") from error


class _Mistakes:
    """Which of some rows cannot be read, and why."""

    def __init__(self, side: FilePictures) -> None:
        self._side = side

    def __call__(self, rows: Tensor) -> list[tuple[int, str]]:
        bad = []
        for row in rows.tolist():
            try:
                self._side.read(row)
            except UserError as error:
                bad.append((row, str(error).removeprefix(f"{self._side.table.where(row)}: ")))
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
    """Say how many of `count` rows are left out, and the first of them."""
    if rows:
        say(f"{len(rows):,} of {count:,} rows are left out, because {reason}:")
        for each in rows[:_SHOWN]:
            say(f"  {each}")
        if len(rows) > _SHOWN:
            say(f"  and {len(rows) - _SHOWN:,} more")


def write_left_out(folder: Path, rows: Sequence[LeftOut]) -> None:
    """Write the file, with the columns place and reason.

    Raises:
        OSError: it cannot be written.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([LeftOut._fields, *rows])
    with replacing(folder / FILE) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))  # a path may hold any bytes
