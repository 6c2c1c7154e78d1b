"""`--skip-bad`: rows whose picture cannot be read, found by reading all of them once, in worker processes.

What the files hold decides for good, until one changes, or Pillow does. What the system refuses, such as a file without
permission or a disk that is not there, may pass without a change of any file, so these rows are tried at each start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wholebatch.app import UserError, cpus_of_a_rank

from ..cache.kept_results import Tensors, kept, text_of, text_tensor
from ..loader import WorkerDiedError, prepared
from ..sides import FilePictures
from .left_out import LeftOut, say_left_out

_ROWS = 256  # that a worker reads at a time
_MOST_WORKERS = 32


class _BadRow(NamedTuple):
    """A row whose picture cannot be read."""

    row: int
    reason: str
    may_pass: bool
    """Whether it is the system's error, not that of the file."""


Bad = list[_BadRow]
"""In the order of the rows."""


class Readable(NamedTuple):
    """The rows of a table whose picture can be read, and the others."""

    rows: Tensor
    """int64, (n,), in order."""
    left_out: tuple[LeftOut, ...]


def readable_rows(
    side: FilePictures, say: Callable[[str], None], *, workers: int, said: Sequence[LeftOut] = ()
) -> Readable:
    """Return the rows whose picture can be read; the number of the others is said, and the first of them.

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
        return {"bad": text_tensor(json.dumps(_find(side, torch.arange(count), workers)))}

    def not_kept(error: OSError) -> None:
        say(f"--skip-bad reads all pictures at each start: the cache cannot be written ({error.strerror or error})")

    result = kept(side, f"Pillow {PIL.__version__}", ".unreadable", find, not_kept)
    bad = [_BadRow(*each) for each in json.loads(text_of(result["bad"]))]
    bad = _read_again(side, bad, workers)
    left_out = tuple(LeftOut(side.table.where(each.row), each.reason) for each in bad)
    if len(bad) == count:
        raise UserError(f"none of the {count} pictures of --data can be read; the first: {left_out[0]}")
    places = {each.place for each in said}
    say_left_out([each for each in left_out if each.place not in places], count, "their picture cannot be read", say)
    is_readable = torch.ones(count, dtype=torch.bool)
    is_readable[[each.row for each in bad]] = False
    return Readable(is_readable.nonzero()[:, 0], left_out)


def _read_again(side: FilePictures, bad: Bad, workers: int) -> Bad:
    """Return the bad rows once those that may pass have been read again."""
    passing = [each.row for each in bad if each.may_pass]
    if not passing:
        return bad
    return sorted([*(each for each in bad if not each.may_pass), *_find(side, torch.tensor(passing), workers)])


def _find(side: FilePictures, rows: Tensor, workers: int) -> Bad:
    parts = prepared(_Mistakes(side), [*rows.split(_ROWS)], workers=workers)
    try:
        return [each for part in parts for each in part]
    except WorkerDiedError as error:
        raise UserError(f"--skip-bad: a process that reads the pictures {error}") from error


class _Mistakes:
    """Which of some rows cannot be read, and why."""

    def __init__(self, side: FilePictures) -> None:
        self._side = side

    def __call__(self, rows: Tensor) -> Bad:
        bad = []
        for row in rows.tolist():
            try:
                self._side.read(row)
            except UserError as error:
                reason = str(error).removeprefix(f"{self._side.table.where(row)}: ")
                bad.append(_BadRow(row, reason, _is_of_system(error)))
        return bad


def _is_of_system(error: BaseException) -> bool:
    """Return whether an error comes from one of the system, which has a number. A file that is not there may come."""
    cause = error.__cause__
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno is not None):
        return not isinstance(cause, FileNotFoundError)  # whose coming changes the stamp of the pictures
    return cause is not None and _is_of_system(cause)
