"""Run `wholebatch bench loss`: measure on new processes, print tables, and write results and plot."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict
from itertools import product

import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch._base.third_party import version
from wholebatch._base.user_error import UserError
from wholebatch._launch.processes import run_processes
from wholebatch._measure import threads_of_a_rank
from wholebatch.planning.declared import declared, is_declared
from wholebatch.planning.form import built_in
from wholebatch.planning.sizes import MAX_SIM
from wholebatch.testing import RankError

from . import loss, loss_display, records
from .config import LOSS_RUN, LossConfig
from .loss import Job
from .peers import PEERS
from .subjects import Configuration


def run_loss(config: LossConfig) -> None:
    """Measure losses, print a table, and write results and plot.

    Args:
        config: the options, checked.

    Raises:
        UserError: if GPUs are missing, and if a method is wrong.
    """
    threads = threads_of_a_rank(max(config.ranks)) if config.threads is None else config.threads
    gpus = torch.cuda.device_count()
    if config.device == "cuda" and gpus < max(config.ranks):
        raise UserError(f"--device cuda needs a GPU for each of {max(config.ranks)} ranks, and there are {gpus}")
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
        loss_display.print_table(rows)
        everything = records.keep(config.results, [asdict(row) for row in rows], LOSS_RUN)
    loss_display.plot(config.results.with_suffix(".png"), everything)
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these results")


def _measured(config: LossConfig, name: str, ranks: int, threads: int, versions: dict[str, str]) -> list[loss.Row]:
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


def _measure_here(job: Job, device: str) -> list[loss.Row]:
    comm = wb.comm.TorchCommunicator() if dist.get_world_size() > 1 else wb.comm.LocalCommunicator()
    if device == "cuda":
        torch.cuda.set_device(comm.rank)
        return loss.measure(comm, job, torch.device("cuda", comm.rank))
    # An allocation of more memory than there is becomes an error; otherwise the machine would kill the process later.
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    resource.setrlimit(resource.RLIMIT_AS, (physical // comm.size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return loss.measure(comm, job, torch.device(device))
