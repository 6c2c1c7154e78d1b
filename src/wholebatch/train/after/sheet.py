"""A sheet of pictures: each query beside its results."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

_PIXELS = 160  # of a side of a picture
MOST_LINES, MOST_COLUMNS = 20, 12


@dataclass(frozen=True)
class Line:
    """A query, a text or a picture, with pictures and a caption below each."""

    query: str | Any
    pictures: Sequence[Any]
    captions: Sequence[str]


def draw_sheet(lines: Sequence[Line], file: BinaryIO) -> None:
    """Draw the first lines, each with its first pictures, as a PNG file."""
    from matplotlib.figure import Figure

    lines = lines[:MOST_LINES]
    columns = min(MOST_COLUMNS, max(len(line.pictures) for line in lines)) + 1
    figure = Figure(figsize=(1.35 * columns, 1.6 * len(lines)))
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for row, line in zip(axes, lines, strict=True):
        for ax in row:
            ax.axis("off")
        if isinstance(line.query, str):
            asked = textwrap.fill(textwrap.shorten(line.query, 90, placeholder=" …"), 18)
            row[0].text(0.02, 0.5, asked, fontsize=8, va="center", transform=row[0].transAxes, parse_math=False)
        else:
            _draw(row[0], line.query)
            row[0].set_title("query", fontsize=7, parse_math=False)
        for ax, picture, caption in zip(row[1:], line.pictures, line.captions, strict=False):
            _draw(ax, picture)
            ax.set_title(textwrap.shorten(caption, 24, placeholder="…"), fontsize=7, parse_math=False)
    figure.subplots_adjust(
        left=0.01, right=0.99, bottom=0.01, top=1 - 0.22 / (1.6 * len(lines)), wspace=0.06, hspace=0.2
    )
    with warnings.catch_warnings():
        # Characters of a user's text that the figure's font lacks become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, dpi=120, format="png")


def _draw(ax: Any, picture: Any) -> None:
    small = picture.copy()
    small.thumbnail((_PIXELS, _PIXELS))
    ax.imshow(small, cmap="gray", vmin=0, vmax=255)
