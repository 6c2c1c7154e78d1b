"""Lines and tables of output, and the line about a file that was written."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_JOINERS = "\u200c\u200d"  # of letters and of emoji, which change no other text
_COMMANDS = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode that a terminal may obey instead of showing


def printable(text: str) -> str:
    r"""Return a text of the data, with escapes for what a terminal would obey, or its encoding does not have.

    >>> printable("a \x1b[2J\u202e"), printable("a\nb")
    ('a \\x1b[2J\\u202e', 'a\\nb')
    """
    shown = "".join(
        repr(letter)[1:-1] if unicodedata.category(letter) in _COMMANDS and letter not in _JOINERS else letter
        for letter in text
    )
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def say(line: str) -> None:
    """Print a line at once."""
    print(printable(line), flush=True)


@contextmanager
def announced(path: Path, content: str) -> Iterator[None]:
    """Print a line about a file once it is written, which says if it has replaced an earlier one."""
    was_there = path.exists()
    yield
    say(f"{path}: {content}" + (", in place of an earlier file" if was_there else ""))


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=any(columns))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(printable, row))
    Console(highlight=False, markup=False, emoji=False).print(table)
