"""Run `wholebatch bench gather` on new processes, or on those of a launcher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch._base.user_error import UserError
from wholebatch._cli.display import print_table as print_rows
from wholebatch._launch.launcher import MPI_SIZES, launcher_size
from wholebatch.comm import Communicator
from wholebatch.testing import RankError, run_ranks

from . import records
from .config import GATHER_RUN, GatherConfig
from .gather import ALL_REDUCE, REDUCE_SCATTER, STRATEGIES, Row, measure


def run_gather(config: GatherConfig) -> None:
    """Time strategies and adjoints, print a table, and write results and plot, for checked options.

    Raises:
        UserError: if a rank fails.
    """
    if any(variable in os.environ for variable in MPI_SIZES):
        try:
            comm: Communicator = wb.comm.MPICommunicator()
        except ImportError as error:
            raise UserError(str(error)) from error
        from mpi4py import MPI

        name = MPI.Get_library_version().split("\n")[0].split(",")[0].replace("MPICH Version:", "MPICH")
        backend = " ".join(name.split()).replace(" v", " ")
    elif launcher_size() is not None:
        dist.init_process_group("gloo")
        comm, backend = wb.comm.TorchCommunicator(), "gloo"
    else:
        for ranks in config.ranks:
            try:
                rows = run_ranks(_measured, ranks, config, timeout_s=3600)[0]
            except RankError as error:
                raise UserError(f"a rank failed: {str(error).splitlines()[0]} (memory?)") from error
            _finish(config, "gloo", rows)
        return
    rows = _measured(config, comm)
    if comm.rank == 0:
        _finish(config, backend, rows)
    if dist.is_initialized():
        dist.destroy_process_group()


def _measured(config: GatherConfig, comm: Communicator | None = None) -> list[Row]:
    torch.set_num_threads(1)
    return measure(comm or wb.comm.TorchCommunicator(), config.embedding_sizes, config.rows_per_rank, config.steps)


def _finish(config: GatherConfig, backend: str, rows: list[Row]) -> None:
    print_table(backend, rows)
    named = [{"backend": backend, **asdict(row)} for row in rows]
    everything = records.keep(config.results, named, GATHER_RUN)
    plot(config.results.with_suffix(".png"), everything)
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these results")


def print_table(backend: str, rows: Sequence[Row]) -> None:
    """Print the times of the three strategies, and of the two adjoints with their bytes."""
    sizes = sorted({row.embedding_size for row in rows})
    by = {(row.method, row.embedding_size): row for row in rows}
    header = [f"d = {size}" for size in sizes]
    print_rows(
        f"SimCLR loss, forward and backward, ms ({backend}, {rows[0].ranks} ranks, {rows[0].rows_per_rank} rows of "
        "each view per rank)",
        ["strategy", *header],
        [[name, *(f"{by[method, size].step_ms:.1f}" for size in sizes)] for method, name in STRATEGIES.items()],
        left=("strategy",),
    )
    print_rows(
        "The all-gather's adjoint, ms (MB that a rank sends)",
        ["adjoint", *header],
        [[method, *(_time_and_bytes(by[method, size]) for size in sizes)] for method in (REDUCE_SCATTER, ALL_REDUCE)],
        left=("adjoint",),
    )


def _time_and_bytes(row: Row) -> str:
    wire = "" if row.wire_bytes_per_rank is None else f" ({row.wire_bytes_per_rank / 1e6:.2f})"
    return f"{row.step_ms:.2f}{wire}"


def plot(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Plot time against embedding size: a panel per backend and rank count, a line per strategy."""
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    backends, rank_counts = (sorted({row[name] for row in rows}) for name in ("backend", "ranks"))
    size = 3.4 * len(rank_counts) + 0.6, 2.7 * len(backends) + 0.8
    figure, axes = plt.subplots(len(backends), len(rank_counts), figsize=size, sharex=True, sharey=True, squeeze=False)
    for (backend, ranks), axis in zip(product(backends, rank_counts), axes.flat, strict=True):
        panel_rows = [row for row in rows if (row["backend"], row["ranks"]) == (backend, ranks)]
        axis.set_visible(bool(panel_rows))
        for (strategy, name), marker in zip(STRATEGIES.items(), "os^", strict=True):
            points = sorted((row["embedding_size"], row["step_ms"]) for row in panel_rows if row["method"] == strategy)
            axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=name)
        axis.set_title(f"{backend}, {ranks} ranks", fontsize=10)
        axis.loglog()
        sizes = sorted({row["embedding_size"] for row in rows})
        axis.set_xticks(sizes, labels=[str(size) for size in sizes])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.supxlabel("embedding size", fontsize=10, y=0.35 / size[1])
    figure.supylabel("ms per step", fontsize=10)
    handles = axes.flat[0].get_lines()
    figure.legend(handles, STRATEGIES.values(), loc="lower center", ncols=3, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.35 / size[1], 1, 1))
    figure.savefig(file, dpi=120)
    plt.close(figure)
