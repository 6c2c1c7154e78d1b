"""The pictures of a run: its curves, and examples of retrieval."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from ..tasks.task import Curve
from .content import Candidate, Gallery


def draw_curves(metrics: list[dict[str, Any]], curves: Sequence[Curve], title: str, path: Path) -> None:
    """Draw the training loss and the figures of the validations over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    dot = "o" if len(metrics) == 1 else None
    steps, losses = [row["step"] for row in metrics], [row["loss"] for row in metrics]
    left.plot(steps, losses, color="tab:blue", linewidth=1, marker=dot)
    left.set(xlabel="step", ylabel="loss of the global batch", ylim=(0, None), title="training")
    validated = [row for row in metrics if "validation" in row]
    for curve in curves:
        values = [reduce(getitem, curve.keys, row["validation"]) for row in validated]
        steps = [row["step"] for row in validated]
        right.plot(steps, values, curve.style, color=curve.color, marker=curve.marker, markersize=4, label=curve.label)
    right.set(xlabel="step", ylabel="fraction", ylim=(0, 1), title=title)
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)


def draw_retrieval(gallery: Gallery, path: Path) -> None:
    """Draw the queries of a gallery, each beside its most similar texts, with the right one marked."""
    from matplotlib.figure import Figure

    columns = 2
    lines = -(-len(gallery.queries) // columns)
    figure = Figure(figsize=(11, 1.25 * lines + 0.5))
    figure.suptitle(textwrap.fill(gallery.note, 130), fontsize=10)
    axes = figure.subplots(lines, 2 * columns, squeeze=False, width_ratios=[1, 4.4] * columns).flatten()
    for ax in axes:
        ax.axis("off")
    for position, query in enumerate(gallery.queries):
        picture, column = axes[2 * position], axes[2 * position + 1]
        if query.item.picture is not None:
            picture.imshow(query.item.picture, cmap="gray", vmin=0, vmax=255)
        else:
            asks = textwrap.fill(textwrap.shorten(query.item.text, 80, placeholder=" …"), 22)
            picture.text(0, 0.9, asks, fontsize=7.5, va="top", transform=picture.transAxes, parse_math=False)
        rows = [
            (f"{'✓' if candidate.right else ' '} {_short(candidate)}", "tab:green" if candidate.right else "0.35")
            for candidate in query.candidates
        ]
        if query.answer is not None:
            rows.append((f"missed, at rank {query.rank}: {_short(query.answer)}", "tab:red"))
        for line, (text, color) in enumerate(rows):
            column.text(
                0, 0.9 - 0.17 * line, text, color=color, fontsize=7.5, family="monospace",
                weight="bold" if color == "tab:green" else "normal", transform=column.transAxes, parse_math=False,
            )  # fmt: skip
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=0.93, wspace=0.05, hspace=0.15)
    with warnings.catch_warnings():
        # Characters of a user's text that the figure's font lacks become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=120)


def _short(candidate: Candidate) -> str:
    return textwrap.shorten(candidate.item.text, 52, placeholder=" …")
