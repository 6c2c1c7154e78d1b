"""The pictures of a run: its curves, and examples of retrieval."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .data.pairs import Pairs
from .data.randomness import seeded
from .retrieval import ranks_of_partner
from .task import Curve

_SHOWN, _TOP = 12, 5
PLURAL = {"image": "images", "text": "texts"}


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


def draw_retrieval(pairs: Pairs, groups: Tensor, queries: Tensor, candidates: Tensor, path: Path) -> None:
    """Draw a random dozen of held-out queries, each beside its five most similar texts, with the right one marked.

    Args:
        pairs: the data.
        groups: (n,), the held-out groups.
        queries: (n, d), features of the first side of each group's first row, pictures or texts.
        candidates: (n, d), those of its second side, texts.
        path: file of the picture.
    """
    from matplotlib.figure import Figure

    chosen = torch.randperm(len(groups), generator=seeded("shown"))[:_SHOWN].tolist()
    best = (queries[chosen] @ candidates.T).topk(min(_TOP, len(groups)), dim=1).indices.tolist()
    ranks = ranks_of_partner(queries, candidates)
    asked, answers = pairs.sides.values()
    rows = pairs.rows(groups)
    shown = asked.items(rows[chosen])

    def name(index: int) -> str:
        return textwrap.shorten(answers.items(rows[index][None])[0], 52, placeholder=" …")

    columns = 2
    lines = -(-len(chosen) // columns)
    figure = Figure(figsize=(11, 1.25 * lines + 0.5))
    first = sum(index == found[0] for index, found in zip(chosen, best, strict=True))
    among = sum(index in found for index, found in zip(chosen, best, strict=True))
    figure.suptitle(
        f"{len(chosen)} of {len(groups)} held-out {PLURAL[asked.kind]}, drawn at random, each beside the "
        f"{len(best[0])} texts most "
        f"similar to it: the right one comes first for {first}, is among them for {among}",
        fontsize=10,
    )
    axes = figure.subplots(lines, 2 * columns, squeeze=False, width_ratios=[1, 4.4] * columns).flatten()
    for ax in axes:
        ax.axis("off")
    for position, (index, found) in enumerate(zip(chosen, best, strict=True)):
        picture, column = axes[2 * position], axes[2 * position + 1]
        if asked.kind == "image":
            picture.imshow(shown[position], cmap="gray", vmin=0, vmax=255)
        else:
            asks = "\n".join(textwrap.wrap(textwrap.shorten(shown[position], 80, placeholder=" …"), 22))
            picture.text(0, 0.9, asks, fontsize=7.5, va="top", transform=picture.transAxes, parse_math=False)
        lines_of_text = [
            (f"✓ {name(index)}" if candidate == index else f"  {name(candidate)}", candidate == index)
            for candidate in found
        ]
        if index not in found:
            rank = int(ranks[index]) + 1
            lines_of_text.append((f"missed, at rank {rank}: {name(index)}", None))
        for line, (text, right) in enumerate(lines_of_text):
            color = {True: "tab:green", False: "0.35", None: "tab:red"}[right]
            column.text(
                0, 0.9 - 0.17 * line, text, color=color, fontsize=7.5,
                family="monospace", weight="bold" if right else "normal", transform=column.transAxes, parse_math=False,
            )  # fmt: skip
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=0.93, wspace=0.05, hspace=0.15)
    with warnings.catch_warnings():
        # Characters of a user's text that the figure's font lacks become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=120)
