"""metrics.jsonl of a run folder, for its writer: it is read at a resume and for the report, not at a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from ..._base.bounded_json import parse_json
from ..._base.files import replacing
from ..._base.user_error import UserError
from .checkpoint import first_lines


class MetricsFile:
    """The lines of the steps made so far, and their digest for the next checkpoint.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] | None = None  # those of the file, from a read until the next line
        self._keep: int | None = None  # lines to keep when the next one is added
        self._lines, self._digest = 0, hashlib.sha256()
        self._is_begun = False  # whether these two are those of the file

    def resume_after(self, step: int) -> None:
        """Drop the lines after `step`, as soon as the next line is added.

        Until then nothing changes: the checkpoint is yet to be read.
        """
        if len(self.rows()) < step:
            raise UserError(f"{self._path} does not hold the steps 1 to {step} of the checkpoint; was it edited?")
        self._keep = step

    def append(self, metrics: dict[str, Any]) -> None:
        """Add a line; a number that is not finite is written as null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        if not self._is_begun:
            self._begin()
        line = json.dumps(finite).encode() + b"\n"
        with self._path.open("ab") as file:
            file.write(line)
        self._rows = None
        self._count(line)

    def digest_of(self, step: int) -> str | None:
        """Return the digest of the first `step` lines, if these are all that there are; else None."""
        return self._digest.hexdigest() if self._is_begun and self._lines == step else None

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines, one for each step, without a last line that a kill cut short."""
        if self._rows is None:
            self._rows = _read(self._path)
        return self._rows

    def _begin(self) -> None:
        """Keep the lines of the steps before, and count them."""
        kept = first_lines(self._path, self._keep) if self._path.exists() else []
        if self._keep is not None:
            with replacing(self._path) as whole:
                whole.write(b"".join(kept))
        for line in kept:
            self._count(line)
        self._keep, self._is_begun = None, True

    def _count(self, line: bytes) -> None:
        self._lines += 1
        self._digest.update(line)


def _read(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = first_lines(path, None) if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(parse_json(line, f"line {number}"))
            except ValueError:
                if line.endswith(b"\n"):
                    raise
        for number, row in enumerate(rows, 1):
            _check_row(row, number)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as the metrics of a run ({error})") from error
    return rows


def _check_row(row: Any, number: int) -> None:
    """Raise ValueError unless a line is that of step `number` and holds only numbers."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] != number:
        raise ValueError(f"line {number} is not that of step {number}")
    others = {name: value for name, value in row.items() if name != "validation"}
    if "loss" not in row or any(type(value) not in (int, float, type(None)) for value in others.values()):
        raise ValueError(f"line {number} must hold a loss, and only numbers")
