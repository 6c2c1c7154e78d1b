"""Lines, tables and files of output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..._base.files import replacing
from ..._base.user_error import UserError, printable


def say(line: str) -> None:
    """Print a line at once."""
    print(printable(line), flush=True)


@contextmanager
def written(path: Path, content: str, argument: str = "--out") -> Iterator[BinaryIO]:
    """Open a file that appears under its name when it is complete, and print a line about its content then.

    Raises:
        UserError: it cannot be written; an earlier file of this name is as it was.
    """
    was_there = path.exists()
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise UserError(f"{argument}: {str(path)!r} cannot be written: {error.strerror or error}") from error
    say(f"{path}: {content}" + (", in place of an earlier file" if was_there else ""))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=any(columns))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(printable, row))
    Console(highlight=False, markup=False, emoji=False).print(table)
