"""`wholebatch bench NAME`: options, ranks, and what to do with the figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

import wholebatch as wb
from wholebatch._user_error import UserError
from wholebatch.comm import Communicator
from wholebatch.comm.select import MPI_SIZES
from wholebatch.testing import RankError, run_ranks

from . import gather, report


@dataclass(frozen=True)
class GatherConfig:
    """Three ways to bring all rows to a loss, timed over the embedding dimension.

    Starts its own processes, on gloo. Under mpiexec (with python -m mpi4py -m wholebatch bench gather) it uses MPI, and
    under torchrun gloo, on the ranks that the launcher has started.
    """

    ranks: tuple[int, ...] = (1, 2, 4)
    """Rank counts, one after the other; a launcher decides by itself."""
    dims: tuple[int, ...] = (128, 512, 2048, 8192)
    """Embedding dimensions of the backbone's output."""
    rows: int = 128
    """Rows of each view on each rank."""
    steps: int = 10
    """Steps that are timed, after two that are not; the figure is their median."""
    results: Path = Path("bench_gather.json")
    """Where figures are kept: those of an earlier run with the same backend, ranks and rows are replaced, others stay.
    The picture of all of them lies beside it, as .png."""


def main(argv: Sequence[str], *, prog: str) -> None:
    """Run a benchmark.

    Raises:
        UserError: for a mistake of the user's.
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {prog} gather [OPTIONS]\n\n  gather  {(GatherConfig.__doc__ or '').splitlines()[0]}")
        raise SystemExit(0 if argv else 2)
    if argv[0] != "gather":
        raise UserError(f"there is no benchmark {argv[0]!r}; choose one of: gather")
    config = tyro.cli(GatherConfig, args=list(argv[1:]), prog=f"{prog} gather")
    for name, values in (
        ("ranks", config.ranks),
        ("dims", config.dims),
        ("rows", [config.rows]),
        ("steps", [config.steps]),
    ):
        if not values or min(values) < 1:
            raise UserError(f"--{name} must be at least 1, got {' '.join(map(str, values)) or 'nothing'}")
    report.read(config.results)  # before the run, not after
    if any(variable in os.environ for variable in MPI_SIZES):
        try:
            comm = wb.comm.MPICommunicator()
        except ImportError as error:
            raise UserError(str(error)) from error
        from mpi4py import MPI

        torch.set_num_threads(1)
        implementation = (
            MPI.Get_library_version().split("\n")[0].split(",")[0].replace("MPICH Version:", "MPICH").split()
        )
        _run_here(config, comm, " ".join(implementation).replace(" v", " "))
    elif "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        _run_here(config, wb.comm.TorchCommunicator(), "gloo")
        dist.destroy_process_group()
    else:
        for ranks in config.ranks:
            try:
                rows = run_ranks(_on_gloo, ranks, config, timeout_s=3600)[0]
            except RankError as error:
                raise UserError(f"a rank failed: {str(error).splitlines()[0]} (memory?)") from error
            _finish(config, "gloo", rows)


def _on_gloo(config: GatherConfig) -> list[gather.Row]:
    torch.set_num_threads(1)
    return gather.measure(wb.comm.TorchCommunicator(), config.dims, config.rows, config.steps)


def _run_here(config: GatherConfig, comm: Communicator, backend: str) -> None:
    rows = gather.measure(comm, config.dims, config.rows, config.steps)
    if comm.rank == 0:
        _finish(config, backend, rows)


def _finish(config: GatherConfig, backend: str, rows: list[gather.Row]) -> None:
    report.print_table(backend, rows)
    everything = report.keep(config.results, backend, rows)
    report.plot(config.results.with_suffix(".png"), everything)
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these figures")
