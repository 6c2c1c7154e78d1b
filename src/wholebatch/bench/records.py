"""Results of benchmarks: rows of JSON, each with machine, versions and commit."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import wholebatch as wb
from wholebatch._base.bounded_json import parse_json
from wholebatch._base.files import read_bounded
from wholebatch._base.machine import processor_name
from wholebatch._base.user_error import UserError

_MOST_BYTES = 2**28


def keep(file: Path, rows: Iterable[Mapping[str, Any]], same_run: Sequence[str]) -> list[dict[str, Any]]:
    """Add rows to the file, and return all; they replace old rows with the same values in all of `same_run`.

    Raises:
        UserError: if the file does not hold results, or cannot be written.
    """
    new = [{**row, **about()} for row in rows]
    runs = {tuple(row[name] for name in same_run) for row in new}
    old = [row for row in read(file, same_run) if tuple(row[name] for name in same_run) not in runs]
    partial = file.with_suffix(".partial")
    try:
        partial.write_text("[\n" + ",\n".join(json.dumps(row) for row in [*old, *new]) + "\n]\n")
        partial.replace(file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error
    return [*old, *new]


def read(file: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows in the file, each with at least the fields `needed`; none if there is no file.

    Raises:
        UserError: if the file does not hold such rows.
    """
    if file.suffix != ".json":
        raise UserError(f"--results must be a file that ends in .json, got {file}")
    if not file.parent.is_dir():
        raise UserError(f"--results: there is no folder {file.parent}")
    if not file.exists():
        return []
    try:
        rows = parse_json(read_bounded(file, _MOST_BYTES), "it")
        assert all(set(needed) <= row.keys() for row in rows)
    except (ValueError, AssertionError, AttributeError, TypeError, OSError) as error:
        why = f": {error}" if str(error) else ""
        raise UserError(f"{file} does not hold the results of this benchmark; name another file{why}") from error
    return list(rows)


def about() -> dict[str, str]:
    """Return the machine, the versions and, in a checkout, the commit."""
    import torch  # here, because options are checked without it

    facts = {
        "machine": f"{processor_name()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "wholebatch": wb.__version__,
    }
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--", ".")  # of the package only: this run has written results
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return facts
    return {**facts, "commit": f"{commit}-dirty" if changed else commit}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(wb.__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
