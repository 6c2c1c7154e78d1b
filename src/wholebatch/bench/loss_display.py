"""Print the table of `bench loss`, and plot all rows of the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from wholebatch._cli.display import print_table as print_rows
from wholebatch._cli.display import print_text

from .loss import Row

_HEADER = ("method", "ms", "x floor", "x first", "TFLOP/s", "MB")
_PANEL = ("loss", "batch_size", "embedding_size", "ranks", "threads", "device")


def print_table(rows: Sequence[Row]) -> None:
    """Print every method of every loss, compared with the first and, if there are peers, with them."""
    for loss in dict.fromkeys(row.loss for row in rows):
        rows_of_loss = [row for row in rows if row.loss == loss]
        first = rows_of_loss[0]
        on = _resources(first.ranks, first.threads, first.device)
        print_rows(
            f"{loss}, batch size {first.batch_size}, embedding size {first.embedding_size}, {on}",
            _HEADER,
            [_cells(row, first) for row in rows_of_loss],
            left=_HEADER[:1],
        )
        for row in rows_of_loss:
            if row.note:
                print_text(f"{row.method}: {row.note}")
    print_text(
        "x floor: relative to torch.mm with the same multiply-adds in the same precision; "
        "x first: relative to the first line; "
        "TFLOP/s: 2 for each multiply-add of the flat loss; MB: transient memory, dX and dY included"
    )


def _cells(row: Row, first: Row) -> list[str]:
    if row.step_ms is None:
        return [row.method, *["-"] * 5]
    times_first = "" if first.step_ms is None else f"{row.step_ms / first.step_ms:.2f}"
    speed = "" if row.tflops is None else _digits(row.tflops)
    transient = "" if row.transient_mb is None else _digits(row.transient_mb)
    return [row.method, _digits(row.step_ms), f"{row.times_floor:.2f}", times_first, speed, transient]


def _resources(ranks: int, threads: int, device: str) -> str:
    if device != "cpu":
        return f"{ranks} x {device}"
    return " of ".join(f"{n} {unit}{'s' * (n > 1)}" for n, unit in ((ranks, "rank"), (threads, "thread")))


def _digits(value: float) -> str:
    """Return the number with at least two significant digits."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"


def plot(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Plot time as a multiple of the floor, and transient memory: a row of panels per loss, a bar per method."""
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row["step_ms"] is not None]
    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault(tuple(row[name] for name in _PANEL), []).append(row)
    heights = [len(group) + 1.2 for group in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 2, figsize=(10, 0.32 * sum(heights) + 0.8), squeeze=False, height_ratios=heights
    )
    for ((loss, batch_size, embedding_size, *on), group), line in zip(panels.items(), axes, strict=True):
        names = [row["method"] for row in group]
        colors = ["tab:blue" if row["package"].startswith("wholebatch") else "tab:gray" for row in group]
        for axis, field in zip(line, ("times_floor", "transient_mb"), strict=True):
            values = [row[field] or 0.0 for row in group]
            labels = [f"{value:.2f}" if field == "times_floor" else _digits(value) for value in values]
            axis.bar_label(axis.barh(names, values, color=colors), labels=labels, padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.margins(x=0.12)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        line[1].set_yticks([])
        line[0].axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        line[0].set_title(f"{loss}, B = {batch_size}, d = {embedding_size}, {_resources(*on)}", fontsize=9, loc="left")
    axes[-1][0].set_xlabel("time; 1: torch.mm for the same multiply-adds", fontsize=9)
    axes[-1][1].set_xlabel("transient memory, MB", fontsize=9)
    machines = ", ".join(dict.fromkeys(f"{row['machine']}, torch {row['torch']}" for row in rows))
    figure.text(0.99, 0.005, machines, fontsize=7, ha="right", color="gray")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(file, dpi=120)
    plt.close(figure)
