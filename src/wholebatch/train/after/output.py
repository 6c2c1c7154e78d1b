"""Lines and tables of output."""

from __future__ import annotations

from collections.abc import Sequence


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=any(columns))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, emoji=False).print(table)
