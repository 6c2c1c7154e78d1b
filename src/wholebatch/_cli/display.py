"""Print tables and text in color on a terminal, and in full, however wide, into a file or a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from .text_table import format_rows, wrapped


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[str],
    styles: Sequence[str] = (),
    headings: Mapping[int, str] | None = None,
) -> None:
    """Print a table; on a terminal its cells wrap to the width between words.

    Args:
        title: above the table; "" for none.
        header: the columns' names.
        rows: one cell for each column.
        left: names of the columns that are aligned to the left.
        styles: one for each row, as rich names them: "red", "bold green", "dim", "".
        headings: by the index of a row, a line above it; "" for an empty line.
    """
    console = Console()
    first, *others = format_rows(header, rows, left=left, width=console.width if console.is_terminal else None)
    as_blocks = not first
    if title:
        print_text(title, "bold")
    if first:
        all_lines = [line for lines in (first, *others) for line in lines]
        for line in (*first, "-" * max(map(len, all_lines))):
            _print(console, line, "")
    for index, lines in enumerate(others):
        heading = (headings or {}).get(index)
        if heading is not None or as_blocks:
            _print(console, heading or "", "bold")
        for line in lines:
            _print(console, line, styles[index] if styles else "")


def print_text(text: str, style: str = "") -> None:
    """Print a line of text; on a terminal it wraps to the width between words."""
    console = Console()
    _print(console, "\n".join(wrapped(text, console.width)) if console.is_terminal else text, style)


def _print(console: Console, line: str, style: str) -> None:
    console.print(Text(line, style=style), soft_wrap=True, highlight=False)
