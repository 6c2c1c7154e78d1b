"""The report of all stages: outcomes, and a table of each stage's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .device import Row

_GROUPS = ("case", "backend", "device", "dtype", "precision", "autocast")


def outcome(code: int | str, record: Row, log: str) -> str:
    """Return what became of a stage, in words.

    Args:
        code: of the exit of its process, or how it ended.
        record: its JSON.
        log: its output.
    """
    if "skipped" in record:
        return f"skipped: {record['skipped']}"
    if code != 0:
        why = [line.strip() for line in log.splitlines() if line.strip()]
        return f"FAILED: {code}" + (f"; {why[-1]}" if why and isinstance(code, int) else "")
    rows = record["results"]
    counts = {what: sum(name in row for row in rows) for what, name in (("errors", "error"), ("skipped", "skipped"))}
    remarks = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f"passed; of {len(rows)} rows: {remarks}" if remarks else "passed"


def table(rows: Sequence[Row]) -> list[str]:
    """Return rows as a table of Markdown, with a column for each name in any of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    lines += [" | ".join(_cell(row.get(name)) for name in names) for row in rows]
    return [f"| {line} |" for line in lines]


def summary(rows: Sequence[Row]) -> list[str]:
    """Return a table of the largest errors by case and precision, and then the rows with an "error" or "skipped"."""
    worst: dict[tuple[tuple[str, Any], ...], Row] = {}
    for row in rows:
        if "skipped" in row:
            continue
        key = tuple((name, row[name]) for name in _GROUPS if name in row)
        of = worst.setdefault(key, {**dict(key), "rows": 0})
        of["rows"] += 1
        for name in (name for name in row if name.startswith("error_of_")):
            of[name] = max(of.get(name, 0.0), row[name])
    others = [row for row in rows if "error" in row or "skipped" in row]
    return [*table(list(worst.values())), *(["", *table(others)] if others else [])]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")
