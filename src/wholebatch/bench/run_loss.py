"""Run `wholebatch bench loss`: measure on new processes, print tables, and write results and plot."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch._base.third_party import version
from wholebatch._base.user_error import UserError
from wholebatch._cli.display import print_table as print_rows
from wholebatch._cli.display import print_text
from wholebatch._launch.processes import run_processes
from wholebatch._measure import threads_of_a_rank
from wholebatch.planning.check import check_gpus, device_of_a_rank
from wholebatch.planning.declared import declared, is_declared
from wholebatch.planning.form import built_in
from wholebatch.planning.sizes import MAX_SIM
from wholebatch.testing import RankError

from . import records
from .config import LOSS_RUN, LossConfig
from .loss import Job, Row, measure
from .peers import PEERS
from .subjects import Configuration

_HEADER = ("method", "ms", "x floor", "x first", "TFLOP/s", "MB")
_PANEL = ("loss", "batch_size", "embedding_size", "ranks", "threads", "device")


def run_loss(config: LossConfig) -> None:
    """Measure losses, print a table, and write results and plot, for checked options.

    Raises:
        UserError: if GPUs are missing, and if a method is wrong.
    """
    threads = threads_of_a_rank(max(config.ranks)) if config.threads is None else config.threads
    check_gpus("--device cuda", config.device, max(config.ranks))
    for name in filter(is_declared, config.losses):
        declared(name, torch.float32)  # a mistake is found before processes start
    peers = [peer for name in config.losses for peer in PEERS.get(name, ()) if config.peers]
    packages = sorted({peer.package for peer in peers if peer.on_cpu or config.device == "cuda"})
    versions = {package: installed for package in packages if (installed := version(package)) is not None}
    for package in packages:
        if package not in versions:
            print(f"{package} is not installed: skipped")
    for ranks in dict.fromkeys(config.ranks):
        rows = [
            row for name in dict.fromkeys(config.losses) for row in _measured(config, name, ranks, threads, versions)
        ]
        print_table(rows)
        everything = records.keep(config.results, [asdict(row) for row in rows], LOSS_RUN)
    plot(config.results.with_suffix(".png"), everything)
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these results")


def _measured(config: LossConfig, name: str, ranks: int, threads: int, versions: dict[str, str]) -> list[Row]:
    """Measure one loss on new processes, so that none uses memory that another has left."""
    keeps, kernels = config.keep, config.kernels
    if name == MAX_SIM:
        keeps = tuple(float(keep > 0) for keep in keeps)
    elif is_declared(name):
        keeps, kernels = (0.0,), ("auto",)
    elif not built_in(name).keeps:
        keeps = (0.0,)
    exchanges = config.exchanges if ranks > 1 else config.exchanges[:1]
    configurations = [
        Configuration(keep, exchange, dtype, kernel)
        for dtype, exchange, kernel, keep in product(config.dtypes, exchanges, kernels, keeps)
    ]
    job = Job(
        name, list(dict.fromkeys(configurations)), *config.sizes_of(name), config.steps, threads, versions,
        config.beside, config.tokens,
    )  # fmt: skip
    try:
        backend = "nccl" if config.device == "cuda" and ranks > 1 else "gloo"
        return run_processes(_measure_here, ranks, job, config.device, backend=backend, timeout_s=7200)[0]
    except RankError as error:
        reason = ([line for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1].strip()
        reason = reason.removeprefix(f"{UserError.__module__}.{UserError.__qualname__}: ")
        raise UserError(f"{name} on {ranks} ranks failed, and nothing was timed: {reason}") from error


def _measure_here(job: Job, device: str) -> list[Row]:
    comm = wb.comm.TorchCommunicator() if dist.get_world_size() > 1 else wb.comm.LocalCommunicator()
    if device == "cpu":
        # An allocation of more memory than there is becomes an error, before the machine kills the process.
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        resource.setrlimit(resource.RLIMIT_AS, (physical // comm.size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return measure(comm, job, device_of_a_rank(device))


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
