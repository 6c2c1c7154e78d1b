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
                rows = run_ranks(_measured_on_gloo, ranks, config, timeout_s=3600)[0]
            except RankError as error:
                raise UserError(f"a rank failed: {str(error).splitlines()[0]} (memory?)") from error
            _finish(config, "gloo", rows)
        return
    rows = _measured(comm, config)
    if comm.rank == 0:
        _finish(config, backend, rows)
    if dist.is_initialized():
        dist.destroy_process_group()


def _measured_on_gloo(config: GatherConfig) -> list[gather.Row]:
    return _measured(wb.comm.TorchCommunicator(), config)


def _measured(comm: Communicator, config: GatherConfig) -> list[gather.Row]:
    torch.set_num_threads(1)
    return gather.measure(comm, config.embedding_sizes, config.rows_per_rank, config.steps)


def _finish(config: GatherConfig, backend: str, rows: list[gather.Row]) -> None:
    gather_display.print_table(backend, rows)
    named = [{"backend": backend, **asdict(row)} for row in rows]
    everything = records.keep(config.results, named, GATHER_RUN)
    gather_display.plot(config.results.with_suffix(".png"), everything)
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these results")
