"""Tables in plain text, which stay readable in any width.

Cells of text wrap between words, numbers with their units do not wrap. Where the columns do not fit side by side, each
row becomes a block with one line for each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

_GAPS = ("  ", " ")  # between columns; one space where two do not fit


def format_rows(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str], width: int | None = None
) -> list[list[str]]:
    """Return the lines of text of the header and of each row.

    Args:
        header: the columns' names; "" for a column that needs none.
        rows: one cell for each column.
        left: names of the columns that are aligned to the left; the others are aligned to the right.
        width: the characters of a line; None: as many as the table needs.

    >>> for lines in format_rows(["setting", "ms"], [["a ring", "3"]], left=["setting"]):
    ...     print(*lines, sep="|")
    setting  ms
    a ring    3
    >>> format_rows(["setting", "ms"], [["a ring", "3"]], left=["setting"], width=8)
    [[], ['setting:', '  a ring', 'ms: 3']]
    """
    columns = [*zip(*rows, strict=True)] if rows else [()] * len(header)
    widths = [max(map(len, (name, *column))) for name, column in zip(header, columns, strict=True)]
    least = [_least(name, column, text=name in left) for name, column in zip(header, columns, strict=True)]
    if width is None:
        return [_row(header, row, widths, left, _GAPS[0]) for row in (header, *rows)]
    for gap in _GAPS:
        room = width - len(gap) * (len(header) - 1)
        if sum(least) <= room:
            while sum(widths) > room:
                shrinkable = [index for index in range(len(widths)) if widths[index] > least[index]]
                widths[max(shrinkable, key=lambda index: widths[index])] -= 1
            return [_row(header, row, widths, left, gap) for row in (header, *rows)]
    return [[], *(_block(header, row, width) for row in rows)]


def _least(name: str, column: Sequence[str], *, text: bool) -> int:
    """Return the width of a column whose header wraps, and whose cells do if they are text."""
    whole = [name, *column] if text else [name]
    words = [word for cell in whole for word in cell.split()]
    return max(map(len, ["", *words, *([] if text else column)]))


def _row(header: Sequence[str], row: Sequence[str], widths: Sequence[int], left: Sequence[str], gap: str) -> list[str]:
    cells = [wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for index in range(max(len(cell) for cell in cells)):
        texts = [cell[index] if index < len(cell) else "" for cell in cells]
        aligned = [
            text.ljust(width) if name in left else text.rjust(width)
            for name, text, width in zip(header, texts, widths, strict=True)
        ]
        lines.append(gap.join(aligned).rstrip())
    return lines


def _block(header: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    texts = [f"{name}: {cell}" if name else cell for name, cell in zip(header, row, strict=True) if cell]
    return [line for text in texts for line in wrapped(text, width, indent=_GAPS[0])]


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the text as lines that break between words; an indented text stays so."""
    if len(text) <= width:
        return [text]
    indent = indent or text[: len(text) - len(text.lstrip())]
    return wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
