"""A sheet of pictures: each query beside its results."""

from __future__ import annotations

import textwrap
import warnings
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

_PIXELS = 160  # of a side of a picture
MOST_LINES, MOST_COLUMNS = 20, 12
_MOST_LETTERS = 100  # of a caption; fewer are as wide as a picture


@dataclass(frozen=True)
class Line:
    """A query, a text or a picture, with pictures and a caption below each."""

    query: str | Any
    pictures: Sequence[Any]
    captions: Sequence[str]


def draw_sheet(lines: Sequence[Line], file: BinaryIO) -> None:
    """Draw the first lines, each with its first pictures, as a PNG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    lines = lines[:MOST_LINES]
    columns = min(MOST_COLUMNS, max(len(line.pictures) for line in lines)) + 1
    texts = "".join(each for line in lines for each in (line.query, *line.captions) if isinstance(each, str))
    with warnings.catch_warnings(), rc_context({"font.family": _families(texts), "text.parse_math": False}):
        # Characters of a user's text that no font of the machine has become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(1.35 * columns, 1.6 * len(lines)), dpi=120)
        axes = figure.subplots(len(lines), columns, squeeze=False)
        figure.subplots_adjust(
            left=0.01, right=0.99, bottom=0.01, top=1 - 0.22 / (1.6 * len(lines)), wspace=0.06, hspace=0.2
        )
        for row, line in zip(axes, lines, strict=True):
            for ax in row:
                ax.axis("off")
            if isinstance(line.query, str):
                asked = textwrap.fill(line.query if len(line.query) <= 90 else f"{line.query[:90]}…", 18)
                row[0].text(0.02, 0.5, asked, fontsize=8, va="center", transform=row[0].transAxes)
            else:
                _draw(row[0], line.query, "query")
            for ax, picture, caption in zip(row[1:], line.pictures, line.captions, strict=False):
                _draw(ax, picture, caption)
        figure.savefig(file, format="png")


def _draw(ax: Any, picture: Any, caption: str) -> None:
    """Draw a picture, and as much of its caption as is not wider than its place."""
    small = picture.copy()
    small.thumbnail((_PIXELS, _PIXELS))
    ax.imshow(small, cmap="gray", vmin=0, vmax=255)
    place = ax.get_position(original=True).width * ax.figure.bbox.width
    caption = " ".join(caption.split())
    title = ax.set_title("", fontsize=7)

    def is_too_wide(letters: int) -> bool:
        title.set_text(caption if letters == len(caption) else f"{caption[:letters].rstrip()}…")
        return bool(title.get_window_extent().width > place)

    # A halving search: a text may be long, and measuring is slow.
    is_too_wide(bisect(range(1, min(len(caption), _MOST_LETTERS) + 1), False, key=is_too_wide))


def _families(texts: str) -> list[str]:
    """Return the fonts of this machine that have the characters of the texts, the usual one first."""
    from matplotlib import font_manager

    families = ["DejaVu Sans"]
    missing = {ord(character) for character in texts if not character.isspace()}
    missing -= {*font_manager.get_font(font_manager.findfont(families[0])).get_charmap()}
    for entry in sorted(font_manager.fontManager.ttflist, key=lambda entry: entry.name):
        if not missing:
            break
        if entry.name.startswith("Last Resort"):  # it has every character, as a box
            continue
        letters = {*font_manager.get_font(entry.fname).get_charmap()}
        if missing & letters:
            missing -= letters
            families.append(entry.name)
    return families
