"""What `bench loss` shows: a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from .loss import Row


def print_table(rows: Sequence[Row]) -> None:
    """Every way of every loss, compared to the first and, if there are peers, to them."""
    console = Console()
    for loss in dict.fromkeys(row.loss for row in rows):
        here = [row for row in rows if row.loss == loss]
        first = here[0]
        title = f"{loss}, B = {first.rows}, d = {first.dim}, {first.ranks} ranks of {first.threads} threads"
        table = Table(title=title, title_justify="left")
        table.add_column("", no_wrap=True)
        for name in ("ms", "x floor", "x first", "MB"):
            table.add_column(name, justify="right")
        for row in here:
            if row.step_ms is None:
                table.add_row(row.what, "-", "-", "-", "-")
                continue
            times_first = "" if first.step_ms is None else f"{row.step_ms / first.step_ms:.2f}"
            transient = "" if row.transient_mb is None else f"{row.transient_mb:.0f}"
            table.add_row(row.what, f"{row.step_ms:.0f}", f"{row.times_floor:.2f}", times_first, transient)
        console.print(table)
        for row in here:
            if row.note:
                console.print(f"{row.what}: {row.note}")
    console.print("x floor: of torch.mm, the same multiply-adds; MB: transient memory")


def plot(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Time as a multiple of the floor, and transient memory: a row of panels per loss, a bar per way."""
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row["step_ms"] is not None]
    panels = list(dict.fromkeys((row["loss"], row["rows"], row["dim"], row["ranks"]) for row in rows))
    groups = [
        [row for row in rows if (row["loss"], row["rows"], row["dim"], row["ranks"]) == panel] for panel in panels
    ]
    heights = [len(group) + 1.2 for group in groups]
    figure, axes = plt.subplots(
        len(panels),
        2,
        figsize=(10, 0.32 * sum(heights) + 0.8),
        squeeze=False,
        height_ratios=heights,
    )
    for (loss, batch, dim, ranks), group, (time_axis, memory_axis) in zip(panels, groups, axes, strict=True):
        names = [row["what"] for row in group]
        colors = ["tab:blue" if row["package"].startswith("wholebatch") else "tab:gray" for row in group]
        for axis, field, form in ((time_axis, "times_floor", "%.2f"), (memory_axis, "transient_mb", "%.0f")):
            values = [row[field] or 0.0 for row in group]
            bars = axis.barh(names, values, color=colors)
            axis.bar_label(bars, fmt=form, padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.margins(x=0.12)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        memory_axis.set_yticks([])
        time_axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        ranks_named = f", {ranks} ranks" if ranks > 1 else ""
        time_axis.set_title(f"{loss}, B = {batch}, d = {dim}{ranks_named}", fontsize=9, loc="left")
    axes[-1][0].set_xlabel("time, as a multiple of the torch.mm floor", fontsize=9)
    axes[-1][1].set_xlabel("transient memory, MB", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
