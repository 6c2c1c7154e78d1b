"""The rows that `--skip-bad` has left out, and the file that lists them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wholebatch.app import UserError, replacing

from ..tables.table import Table

FILE = "left_out.csv"
_SHOWN = 5


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
