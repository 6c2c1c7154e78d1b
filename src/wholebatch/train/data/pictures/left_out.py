"""The rows that `--skip-bad` has left out, and the file that lists them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...._files import replacing

FILE = "left_out.csv"


class LeftOut(NamedTuple):
    """A row that is left out."""

    place: str
    """The file, and the line or the member."""
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


def write_left_out(folder: Path, rows: Sequence[LeftOut]) -> None:
    """Write the file, with the columns place and reason.

    Raises:
        OSError: it cannot be written.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([LeftOut._fields, *rows])
    with replacing(folder / FILE) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))  # a path may hold any bytes
