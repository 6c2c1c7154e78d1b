"""Lines and tables of output, and the line about a file that was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..._base.user_error import printable


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
