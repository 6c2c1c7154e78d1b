"""The lines of metrics.jsonl of a run folder: they are read at a resume and for the report, not at a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..._base.bounded_json import parse_json
from ..._base.user_error import UserError
from .checkpoint import first_lines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, one for each step, without a last line that a kill cut short."""
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
