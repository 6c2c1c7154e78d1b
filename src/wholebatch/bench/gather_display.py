"""What `bench gather` shows: tables of times and bytes, and a picture of all rows in the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from .gather import ALL_REDUCE, REDUCE_SCATTER, STRATEGIES, Row


def print_table(backend: str, rows: Sequence[Row]) -> None:
    """Times of the three strategies, and of the two adjoints with their bytes."""
    console = Console()
    dims = sorted({row.dim for row in rows})
    by = {(row.what, row.dim): row for row in rows}
    title = f"{backend}, {rows[0].ranks} ranks, {rows[0].rows_per_rank} rows of each view per rank"
    table = Table(title=f"SimCLR loss, forward and backward, ms ({title})", title_justify="left")
    table.add_column("strategy")
    for dim in dims:
        table.add_column(f"d = {dim}", justify="right")
    for strategy, name in STRATEGIES.items():
        table.add_row(name, *(f"{by[strategy, dim].step_ms:.1f}" for dim in dims))
    console.print(table)
    table = Table(title="The all-gather's adjoint, ms (MB that a rank puts on the wire)", title_justify="left")
    table.add_column("way")
    for dim in dims:
        table.add_column(f"d = {dim}", justify="right")
    for way in (REDUCE_SCATTER, ALL_REDUCE):
        table.add_row(way, *(_time_and_bytes(by[way, dim]) for dim in dims))
    console.print(table)


def _time_and_bytes(row: Row) -> str:
    wire = "" if row.wire_bytes_per_rank is None else f" ({row.wire_bytes_per_rank / 1e6:.2f})"
    return f"{row.step_ms:.2f}{wire}"


def plot(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Time against embedding dimension: a panel per backend and rank count, a line per strategy."""
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    panels = sorted({(row["backend"], row["ranks"]) for row in rows})
    backends = sorted({backend for backend, _ in panels})
    columns = max(sum(backend == other for other, _ in panels) for backend in backends)
    figure, axes = plt.subplots(
        len(backends),
        columns,
        figsize=(3.4 * columns + 0.6, 2.7 * len(backends) + 0.8),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for line, backend in zip(axes, backends, strict=True):
        ranks_here = [ranks for other, ranks in panels if other == backend]
        for position, axis in enumerate(line):
            if position >= len(ranks_here):
                axis.set_visible(False)
                continue
            here = [row for row in rows if (row["backend"], row["ranks"]) == (backend, ranks_here[position])]
            for (strategy, name), marker in zip(STRATEGIES.items(), "os^", strict=True):
                points = sorted((row["dim"], row["step_ms"]) for row in here if row["what"] == strategy)
                axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=name)
            axis.set_title(f"{backend}, {ranks_here[position]} ranks", fontsize=10)
            dims = sorted({row["dim"] for row in here})
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xticks(dims, labels=[str(dim) for dim in dims])
            axis.yaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            if position == 0:
                axis.set_ylabel("ms per step")
    for axis in axes[-1]:
        axis.set_xlabel("embedding dimension")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 1))
    figure.savefig(file, dpi=120)
    plt.close(figure)
