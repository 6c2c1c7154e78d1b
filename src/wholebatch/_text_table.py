"""Tables in plain text, which stay readable in any width.

Cells wrap between words, never inside one. Where the longest words of all columns do not fit side by side, each row
becomes a block with one line for each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

_GAP = "  "


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
    columns = [*zip(header, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        words = [max(len(word) for cell in column for word in [*cell.split(), ""]) for column in columns]
        room = width - len(_GAP) * (len(header) - 1)
        if sum(words) > room:
            return [[], *(_block(header, row, width) for row in rows)]
        while sum(widths) > room:
            spare = [at for at in range(len(widths)) if widths[at] > words[at]]
            widths[max(spare, key=lambda at: widths[at])] -= 1
    return [_row(header, row, widths, left) for row in (header, *rows)]


def _row(header: Sequence[str], row: Sequence[str], widths: Sequence[int], left: Sequence[str]) -> list[str]:
    cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for at in range(max(len(cell) for cell in cells)):
        texts = [cell[at] if at < len(cell) else "" for cell in cells]
        aligned = [
            text.ljust(width) if name in left else text.rjust(width)
            for name, text, width in zip(header, texts, widths, strict=True)
        ]
        lines.append(_GAP.join(aligned).rstrip())
    return lines


def _block(header: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    texts = [f"{name}: {cell}" if name else cell for name, cell in zip(header, row, strict=True) if cell]
    return [line for text in texts for line in _wrapped(text, width, indent=_GAP)]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    if len(text) <= width:
        return [text]
    return wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
