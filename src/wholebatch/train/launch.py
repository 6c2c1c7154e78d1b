"""Who the ranks are: this process alone, local processes that we start, or those of a launcher such as torchrun."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

import wholebatch as wb

from .checkpoint import read_facts
from .config import TrainConfig
from .errors import UserError
from .loop import train
from .progress import ConsoleProgress, Progress
from .run_folder import RunFolder


def run(config: TrainConfig) -> None:
    """Train with the ranks that the configuration or the launcher asks for.

    Raises:
        UserError: for a mistake in configuration, data or run folder, on whichever rank it was found.
    """
    config.check()
    launched = _launcher_size(os.environ)
    if launched is not None and config.processes not in (1, launched):
        raise UserError(f"--processes {config.processes} under a launcher that has started {launched}; leave it out")
    size = launched or config.processes
    if config.batch_size < size:
        raise UserError(f"--batch-size {config.batch_size} is smaller than the number of processes, {size}")
    if launched is not None:
        local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        _run_rank(config, "env://", local_rank=local_rank, local_size=local_size)
    elif size == 1:
        _train_on_this_rank(config, _device(config, 0, 1))
    else:
        _start_local_ranks(config)


def _launcher_size(environment: Mapping[str, str]) -> int | None:
    """Number of ranks if torchrun, or something that sets the same variables, has started this process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(environment["WORLD_SIZE"]) if all(name in environment for name in names) else None


def _start_local_ranks(config: TrainConfig) -> None:
    """One process per rank; they meet in a file. The first to fail ends the others, and its error is raised here."""
    # It reports every process that it ends after another has failed; the failure itself is reported here.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="wholebatch-train-") as folder:
        context = start_processes(
            _local_rank, (config, folder), nprocs=config.processes, join=False, daemon=True, start_method="spawn"
        )
        try:
            while not context.join():
                pass
        except ProcessExitedException as failure:
            message = Path(folder) / f"error-{failure.error_index}"
            if not message.exists():
                raise
            raise UserError(message.read_text()) from None


def _local_rank(rank: int, config: TrainConfig, folder: str) -> None:
    """The life of a process that `_start_local_ranks` has started."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(config.processes)}
    try:
        _run_rank(config, (Path(folder) / "store").as_uri(), local_rank=rank, local_size=config.processes)
    except UserError as error:
        (Path(folder) / f"error-{rank}").write_text(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _run_rank(config: TrainConfig, init_method: str, *, local_rank: int, local_size: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    device = _device(config, local_rank, local_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    try:
        _train_on_this_rank(config, device)
    finally:
        dist.destroy_process_group()


def _device(config: TrainConfig, local_rank: int, local_size: int) -> torch.device:
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    if config.device == "cuda" and not enough:
        raise UserError(
            f"--device cuda needs a GPU for each of the {local_size} processes of this machine, "
            f"found {torch.cuda.device_count() if torch.cuda.is_available() else 0}"
        )
    if config.device == "cpu" or not enough:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _train_on_this_rank(config: TrainConfig, device: torch.device) -> None:
    """Prepare the run folder on rank 0, train, report; a mistake that rank 0 finds ends all ranks."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    folder: RunFolder | None = None

    def prepare() -> dict[str, str]:
        nonlocal folder
        if is_first:
            folder = _open_folder(config)
        return {}

    try:
        wb.comm.handshake(wb.comm.select_communicator(None), prepare, caller="run folder")
    except ValueError as error:
        raise UserError(str(error).removeprefix("run folder: ").removeprefix("rank 0: ")) from error
    progress = ConsoleProgress() if is_first else Progress()
    try:
        train(config, folder, progress, device)
    finally:
        progress.stop()
    if folder is not None:
        progress.report(folder.path)


def _open_folder(config: TrainConfig) -> RunFolder:
    if config.resume is not None:
        return RunFolder.reopen(config.resume, step=read_facts(config.resume)["step"])
    path = config.run_folder or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return RunFolder.create(path, dataclasses.replace(config, run_folder=path))
