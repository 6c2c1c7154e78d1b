"""`--skip-bad`: rows whose picture cannot be read, found by reading all of them once, in worker processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._bounded_json import check_fields, parse_json
from ..._cpus import cpus_of_a_rank
from ..._files import read_bounded
from ..._user_error import UserError
from .feed import WorkerDiedError, prepared
from .kept import kept
from .left_out import LeftOut
from .sides import FilePictures

_ROWS = 256  # that a worker reads at a time
_SHOWN = 5
_MOST_WORKERS = 32
_MOST_BYTES = 2**30  # of a result
_ENDING = ".unreadable.json"

Bad = list[tuple[int, str]]
"""Rows, in order, and why they cannot be read."""


class Readable(NamedTuple):
    """The rows of a table whose picture can be read, and the others."""

    rows: Tensor
    """int64, (n,), in order."""
    left_out: tuple[LeftOut, ...]


def readable_rows(side: FilePictures, say: Callable[[str], None], *, workers: int) -> Readable:
    """Return the rows whose picture can be read; the number of the others is said, and the first of them.

    Args:
        side: the pictures.
        say: called with lines.
        workers: processes that read; -1: as many as there are CPUs, at most 32.

    Raises:
        UserError: if none can be read.
    """
    workers = workers if workers >= 0 else min(_MOST_WORKERS, cpus_of_a_rank(1))
    count = len(side.table)

    def find() -> Bad:
        say(f"--skip-bad: reading all {count:,} pictures, once")
        return _find(side, workers)

    def not_kept(error: OSError) -> None:
        say(f"--skip-bad reads all pictures at each start: the cache cannot be written ({error.strerror or error})")

    bad = kept(
        side, "", _ENDING, read=lambda file: _read(file, count), find=find, write=_writer(count), not_kept=not_kept
    )
    left_out = tuple(LeftOut(side.table.where(row), reason) for row, reason in bad)
    if len(bad) == count:
        raise UserError(f"none of the {count} pictures of --data can be read; the first: {left_out[0]}")
    if bad:
        say(f"{len(bad):,} of {count:,} rows are left out, because their picture cannot be read:")
        for each in left_out[:_SHOWN]:
            say(f"  {each}")
        if len(bad) > _SHOWN:
            say(f"  and {len(bad) - _SHOWN:,} more")
    is_readable = torch.ones(count, dtype=torch.bool)
    is_readable[[row for row, _ in bad]] = False
    return Readable(is_readable.nonzero()[:, 0], left_out)


def _writer(rows: int) -> Callable[[Any, Bad], None]:
    def write(file: Any, bad: Bad) -> None:
        file.write(json.dumps({"rows": rows, "bad": bad}).encode())

    return write


def _read(file: Path, rows: int) -> Bad | None:
    """Return the result in a file; None if there is none, or a damaged one."""
    try:
        value = check_fields(
            parse_json(read_bounded(file, _MOST_BYTES), str(file)), str(file), {"rows": int, "bad": list}
        )
        bad = [(row, reason) for row, reason in value["bad"]]
    except (OSError, ValueError, TypeError):
        return None
    numbers = [row for row, _ in bad]
    if not all(type(row) is int and type(reason) is str for row, reason in bad):
        return None
    is_whole = value["rows"] == rows and numbers == sorted({*numbers}) and all(0 <= row < rows for row in numbers)
    return bad if is_whole else None


def _find(side: FilePictures, workers: int) -> Bad:
    parts = prepared(_Mistakes(side), [*torch.arange(len(side.table)).split(_ROWS)], workers=workers)
    try:
        return [each for part in parts for each in part]
    except WorkerDiedError as error:
        raise UserError(f"--skip-bad: a process that reads the pictures {error}") from error


class _Mistakes:
    """Which of some rows cannot be read, and why."""

    def __init__(self, side: FilePictures) -> None:
        self._side = side

    def __call__(self, rows: Tensor) -> Bad:
        found = []
        for row in rows.tolist():
            try:
                self._side.read(row)
            except UserError as error:
                found.append((row, str(error).removeprefix(f"{self._side.table.where(row)}: ")))
        return found
