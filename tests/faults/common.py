"""Helpers of the programs in this folder: they count and print outcomes and write them to a file."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault, and the command that repeats it."""

    outcome: str  # a name from the program's own table of classes
    fault: str
    detail: str
    repeat: str
    allowed: bool


def options(description: str | None, *, count: int) -> argparse.ArgumentParser:
    """Return a parser with the options that each program takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    parser.add_argument("--count", type=int, default=count, help="how many faults")
    parser.add_argument("--json", type=Path, help="a file for all outcomes")
    return parser


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with aligned columns."""
    table = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    print(f"\n{title}")
    for number, row in enumerate(table):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if not number:
            print("  " + "  ".join("-" * width for width in widths))


def finish(
    program: str,
    classes: dict[str, str],
    outcomes: Sequence[Outcome],
    arguments: argparse.Namespace,
    began: float,
    **more: Any,
) -> int:
    """Print the counts and every forbidden case, write the file, and return the exit code.

    Args:
        program: the name of the program.
        classes: the name and the meaning of each class of outcome.
        outcomes: the outcomes of all faults.
        arguments: the command line, with `seed`, `count` and `json`.
        began: `time.monotonic()` at the start.
        more: further facts for the file.
    """
    offending = [one for one in outcomes if not one.allowed]
    counts, wrong = Counter(one.outcome for one in outcomes), Counter(one.outcome for one in offending)
    show_table(
        f"{program}: {len(outcomes)} faults, seed {arguments.seed}, {time.monotonic() - began:.0f} s",
        ("outcome", "count", "offending", "meaning"),
        [(name, counts[name], wrong[name], meaning) for name, meaning in classes.items()],
    )
    for one in offending:
        print(f"\nOFFENDING, {one.outcome}: {one.fault}\n  {one.detail}\n  repeat: {one.repeat}")
    code = int(bool(offending))
    if arguments.json:
        facts = {
            "program": program,
            "seed": arguments.seed,
            "count": len(outcomes),
            "classes": {name: counts[name] for name in classes},
            "offending": {name: wrong[name] for name in classes},
            "seconds": round(time.monotonic() - began, 1),
            "exit code": code,
            **versions(),
            **more,
            "outcomes": [asdict(one) for one in outcomes],
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"\n{'FAILED' if code else 'passed'}: {len(offending)} of {len(outcomes)} outcomes are not allowed")
    return code


def versions() -> dict[str, Any]:
    """Return the versions of the code and of its environment."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "command": " ".join(sys.argv),
    }
