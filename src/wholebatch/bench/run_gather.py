"""Run `wholebatch bench gather` on new processes, or on those of a launcher."""

from __future__ import annotations

import os
from dataclasses import asdict

import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch._base.user_error import UserError
from wholebatch._launch.launcher import MPI_SIZES, launcher_size
from wholebatch.comm import Communicator
from wholebatch.testing import RankError, run_ranks

from . import gather, gather_display, records
from .config import GATHER_RUN, GatherConfig


def run_gather(config: GatherConfig) -> None:
    """Time strategies and adjoints, print a table, and write results and plot.

    Args:
        config: the options, checked.

    Raises:
        UserError: if a rank fails.
    """
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
    elif launcher_size() is not None:
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
    return gather.measure(wb.comm.TorchCommunicator(), config.embedding_sizes, config.rows_per_rank, config.steps)


def _run_here(config: GatherConfig, comm: Communicator, backend: str) -> None:
    rows = gather.measure(comm, config.embedding_sizes, config.rows_per_rank, config.steps)
    if comm.rank == 0:
        _finish(config, backend, rows)


def _finish(config: GatherConfig, backend: str, rows: list[gather.Row]) -> None:
    gather_display.print_table(backend, rows)
    named = [{"backend": backend, **asdict(row)} for row in rows]
    everything = records.keep(config.results, named, GATHER_RUN)
    gather_display.plot(config.results.with_suffix(".png"), everything)
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these results")
