"""Lines and tables of output, files that are written, and errors of files that are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from wholebatch.app import UserError, printable, replacing, writing

Kinds = tuple[type[Exception], ...]


def say(line: str) -> None:
    print(printable(line), flush=True)


@contextmanager
def written(path: Path, content: str, argument: str = "--out") -> Iterator[BinaryIO]:
    """Open a file that appears under its name when it is complete, and print a line about its content then."""
    was_there = path.exists()
    with writing(f"{argument}: {str(path)!r}"), replacing(path) as file:
        yield file
    say(f"{path}: {content}" + (", in place of an earlier file" if was_there else ""))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=any(columns))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(printable, row))
    Console(highlight=False, markup=False, emoji=False).print(table)


@contextmanager
def reading(path: Path, description: str, kinds: Kinds, *, named: Kinds = ()) -> Iterator[None]:
    """Turn an error of a file into a UserError."""
    try:
        yield
    except UserError:
        raise
    except named as error:
        raise UserError(str(error)) from error
    except kinds as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{str(path)!r} cannot be read as {description}: {reason}") from error
