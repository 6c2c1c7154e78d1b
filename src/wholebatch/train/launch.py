"""Who the ranks are: this process alone, local processes that we start, or those of a launcher such as torchrun."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

import wholebatch as wb

from .._meter import threads_of_a_rank
from .._user_error import UserError
from .audited import audit_start
from .checkpoint import last_step
from .config import TrainConfig
from .data import Data, load_data, make_task
from .loop import train
from .planned import plan_start
from .progress import ConsoleProgress, Progress
from .run_folder import RunFolder


def run(config: TrainConfig) -> None:
    """Train with the ranks that the configuration or the launcher asks for.

    Raises:
        UserError: for a mistake in configuration, data or run folder, on whichever rank it was found.
    """
    config.check()
    launched = launcher_size()
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


def launcher_size() -> int | None:
    """Number of ranks if torchrun, or something that sets the same variables, has started this process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else None


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
        except (ProcessExitedException, ProcessRaisedException):
            # Whichever rank went first: the one that left a message knows why.
            messages = sorted(Path(folder).glob("error-*"))
            if not messages:
                raise
            raise UserError(messages[0].read_text()) from None


def _local_rank(rank: int, config: TrainConfig, folder: str) -> None:
    """The life of a process that `_start_local_ranks` has started."""
    # The parent's end is told to its ranks by SIGINT, which they must not have inherited as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(config.processes)}
    try:
        _run_rank(config, (Path(folder) / "store").as_uri(), local_rank=rank, local_size=config.processes)
    except UserError as error:
        (Path(folder) / f"error-{rank}").write_text(str(error))
        _leave(2)
    except KeyboardInterrupt:
        _leave(130)
    _leave(0)


def _leave(code: int) -> None:
    """End this process without the interpreter's teardown, in which gloo's threads abort now and then (torch 2.13)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_rank(config: TrainConfig, init_method: str, *, local_rank: int, local_size: int) -> None:
    torch.set_num_threads(threads_of_a_rank(local_size))
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
    """Load the data, prepare the run folder on rank 0, train, report; a mistake on any rank ends all ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    is_first = rank == 0
    (data, folder), path = _together(lambda: _prepare(config, size, is_first=is_first))
    progress = ConsoleProgress() if is_first else Progress()
    try:
        if folder is not None:
            progress.show_folder(folder.path)
        progress.show_plan(plan_start(config, data, device, size=size))
        if config.audit and config.resume is None:
            progress.show_audit(audit_start(config, data, device, rank=rank, size=size))
        task = make_task(config, data, device, rank=rank, size=size)
        train(config, task, path, folder, progress, size=size)
    except KeyboardInterrupt:
        if folder is not None:
            progress.stop()
            progress.show_how_to_resume(folder.path)
        raise
    finally:
        progress.stop()
    if folder is not None:
        progress.report(folder, task)


_Prepared = tuple[Data, RunFolder | None]


def _together(prepare: Callable[[], _Prepared]) -> tuple[_Prepared, Path]:
    """What `prepare` returns, once it has succeeded on all ranks, and where rank 0 writes.

    The UserError of one rank is raised on all.
    """
    prepared: list[_Prepared] = []

    def state() -> dict[str, Any]:
        prepared.append(prepare())
        folder = prepared[0][1]
        return {"folder": None if folder is None else str(folder.path)}

    try:
        everyone = wb.comm.handshake(wb.comm.select_communicator(None), state, caller="set-up")
    except ValueError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, UserError):
            raise  # a bug of ours, with its traceback
        raise UserError(str(error).removeprefix("set-up: ")) from error
    return prepared[0], Path(everyone[0]["folder"])


def _prepare(config: TrainConfig, size: int, *, is_first: bool) -> _Prepared:
    """The data on every rank, and then, so that a mistake in them leaves nothing behind, the folder on rank 0."""
    data = load_data(config, size)
    if not is_first:
        return data, None
    if config.resume is not None:
        recorded = len(RunFolder(config.resume).metrics())
        step = last_step(config.resume, recorded=recorded, checkpoint_every=config.checkpoint_every)
        return data, RunFolder.reopen(config.resume, step=step)
    path = config.run_folder or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return data, RunFolder.create(path, dataclasses.replace(config, run_folder=path))
