"""Tables in a terminal, and in what is not one: a file, a log of continuous integration."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_ANY = 10_000  # columns


def print_in_full(shown: Table, *, fold: bool = False) -> Console:
    """Print a table as wide as it is: a line that is too long for a terminal is its own to break.

    Args:
        shown: the table.
        fold: on a terminal, cells are folded to its width.
    """
    console = Console()
    if not (fold and console.is_terminal):
        console = Console(width=max(console.width, Console(width=_ANY).measure(shown).maximum))
    console.print(shown)
    return console
