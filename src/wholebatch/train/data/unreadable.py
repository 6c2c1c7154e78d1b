"""`--skip-bad`: rows whose picture cannot be read, found by reading all of them once, in worker processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._user_error import UserError
from .feed import WorkerDiedError, prepared
from .sides import FilePictures

_ROWS = 256  # that a worker reads at a time
_SHOWN = 5


class _Mistakes:
    """Which of some rows cannot be read, and why."""

    def __init__(self, side: FilePictures) -> None:
        self._side = side

    def __call__(self, rows: Tensor) -> list[tuple[int, str]]:
        found = []
        for row in rows.tolist():
            try:
                self._side.read(row)
            except UserError as error:
                found.append((row, str(error)))
        return found


def readable_rows(side: FilePictures, say: Callable[[str], None], *, workers: int) -> Tensor:
    """Return the rows whose picture can be read, in order; the number of the others is said, and the first of them.

    Raises:
        UserError: if none can be read.
    """
    rows = torch.arange(len(side.table))
    parts = prepared(_Mistakes(side), [*rows.split(_ROWS)], workers=workers)
    try:
        bad = [each for part in parts for each in part]
    except WorkerDiedError as error:
        raise UserError(f"--skip-bad: a process that reads the pictures {error}") from error
    if len(bad) == len(rows):
        raise UserError(f"none of the {len(rows)} pictures of --data can be read; the first: {bad[0][1]}")
    if bad:
        say(f"{len(bad):,} of {len(rows):,} rows are left out, because their picture cannot be read:")
        for _, message in bad[:_SHOWN]:
            say(f"  {message}")
        if len(bad) > _SHOWN:
            say(f"  and {len(bad) - _SHOWN:,} more")
    kept = torch.ones(len(rows), dtype=torch.bool)
    kept[[row for row, _ in bad]] = False
    return rows[kept]
