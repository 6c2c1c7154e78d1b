"""Who the ranks are: this process alone, local processes that we start, or those of a launcher such as torchrun."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._measure import threads_of_a_rank
from .._settings import environment_integer
from .._user_error import UserError
from .all_ranks import on_all_ranks
from .audited import audit_start
from .checkpoint import last_step
from .config import TrainConfig
from .data import Data, load_data, make_task
from .local_ranks import RankDiedError, is_of_a_connection, one_line, run_local_ranks
from .loop import train
from .planned import plan_start
from .progress import ConsoleProgress, Progress
from .run_folder import RunFolder
from .signals import Requests, how_to_resume


def run(config: TrainConfig) -> None:
    """Train with the ranks that the configuration or the launcher asks for.

    Raises:
        UserError: for a mistake in configuration, data, environment or run folder, on whichever rank it was found.
        Stopped: if a signal has ended the run.
    """
    config.check()
    launched = launcher_size()
    if launched is not None and config.processes not in (1, launched):
        raise UserError(f"--processes {config.processes} under a launcher that has started {launched}; leave it out")
    size = launched or config.processes
    if config.batch_size < size:
        raise UserError(f"--batch-size {config.batch_size} is smaller than the number of processes, {size}")
    if launched is not None:
        _launched_rank(config)
    elif size == 1:
        with closing(Requests()) as requests:
            _train_on_this_rank(config, _device(config, 0, 1), requests)
    else:
        if config.resume is not None:
            RunFolder.lock(config.resume).close()  # rank 0 holds it, but a refusal need not wait until ranks are there
        run_local_ranks(dataclasses.replace(config, run_folder=_folder(config)), _local_rank)


def launcher_size() -> int | None:
    """Number of ranks if torchrun, or something that sets the same variables, has started this process.

    Raises:
        UserError: if the variables contradict themselves, or some are missing for several processes.
    """
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return None
    missing = [name for name in _OF_LAUNCHER if name not in os.environ]
    known_size = _integer("WORLD_SIZE", 1, None)
    size, rank = known_size or 1, _integer("RANK", 0, None if known_size is None else known_size - 1) or 0
    if missing and size == 1 and rank == 0:
        return None
    if missing:
        found = ", ".join(f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ)
        raise UserError(
            f"{found} says that a launcher has started several processes, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start with torchrun, which sets all of "
            f"{', '.join(_OF_LAUNCHER)}, or unset them"
        )
    _integer("LOCAL_RANK", 0, (_integer("LOCAL_WORLD_SIZE", 1, size) or 1) - 1)
    _integer("MASTER_PORT", 1, 65535)
    if not os.environ["MASTER_ADDR"].strip():
        raise UserError("MASTER_ADDR must be the address of the machine of rank 0, got ''")
    return size


_OF_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _integer(name: str, smallest: int, largest: int | None) -> int | None:
    """The value of an environment variable of a launcher, None if that is not set."""
    try:
        return environment_integer(name, least=smallest, most=largest, fix="a launcher sets it")
    except ValueError as error:
        raise UserError(str(error)) from error


def _launched_rank(config: TrainConfig) -> None:
    """The life of a process that torchrun, or another launcher, has started."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if local_size == int(os.environ["WORLD_SIZE"]):  # all on this machine, which can start as many without a launcher
        config = dataclasses.replace(config, processes=local_size)
    with closing(Requests(announce=os.environ["RANK"] == "0")) as requests:
        try:
            _run_rank(config, "env://", requests, local_rank=local_rank, local_size=local_size)
        except Exception as error:
            if not is_of_a_connection(error):
                raise
            raise RankDiedError(
                f"rank {os.environ['RANK']} lost its connection to the others, one of which has probably ended "
                f"({one_line(error)}){how_to_resume(requests.folder)}"
            ) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _local_rank(config: TrainConfig, init_method: str, rank: int, launcher: Connection) -> None:
    """The life of a process that `run_local_ranks` has started. It leaves without cleaning up if it does not end well.

    That would tell the other ranks that it is gone before it has told why.
    """
    requests = Requests(launcher, announce=False)
    _run_rank(config, init_method, requests, local_rank=rank, local_size=config.processes)
    dist.destroy_process_group()


def _run_rank(config: TrainConfig, init_method: str, requests: Requests, *, local_rank: int, local_size: int) -> None:
    torch.set_num_threads(threads_of_a_rank(local_size))
    device = _device(config, local_rank, local_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    _train_on_this_rank(config, device, requests)


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


def _train_on_this_rank(config: TrainConfig, device: torch.device, requests: Requests) -> None:
    """Load the data, prepare the run folder on rank 0, train, report; a mistake on any rank ends all ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    is_first = rank == 0
    progress = ConsoleProgress() if is_first else Progress()
    with ExitStack() as held:
        (data, folder), path = _together(lambda: _prepare(config, size, held, is_first=is_first))
        held.callback(progress.stop)
        requests.device, requests.folder = device, path
        if folder is not None:
            progress.show_folder(folder.path)
        progress.show_plan(plan_start(config, data, device, size=size))
        if config.audit and config.resume is None:
            progress.show_audit(audit_start(config, data, device, rank=rank, size=size))
        task = make_task(config, data, device, rank=rank, size=size)
        try:
            train(config, task, path, folder, progress, requests, size=size)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise _no_memory(error, rank, size) from error
        progress.stop()
        if folder is not None:
            progress.report(folder, task)


def _no_memory(error: BaseException, rank: int, size: int) -> UserError:
    return UserError(
        f"rank {rank} of {size} is out of memory: {one_line(error) or type(error).__name__}. "
        "--chunk-size encodes fewer pairs at a time, for the same gradient"
    )


_Prepared = tuple[Data, RunFolder | None]


def _together(prepare: Callable[[], _Prepared]) -> tuple[_Prepared, Path]:
    """What `prepare` returns, once it has succeeded on all ranks, and where rank 0 writes.

    The UserError of one rank is raised on all.
    """

    def folder_of(prepared: _Prepared) -> dict[str, Any]:
        return {"folder": None if prepared[1] is None else str(prepared[1].path)}

    prepared, everyone = on_all_ranks("set-up", prepare, folder_of)
    return prepared, Path(everyone[0]["folder"])


def _prepare(config: TrainConfig, size: int, held: ExitStack, *, is_first: bool) -> _Prepared:
    """The data on every rank, and then, so that a mistake in them leaves nothing behind, the folder on rank 0.

    A run that goes on has its folder, and locks it before anything is read.
    """
    folder = None
    if is_first and config.resume is not None:
        folder = RunFolder.lock(config.resume)
        held.callback(folder.close)
    data = load_data(config, size)
    if not is_first:
        return data, None
    if folder is not None:
        step = last_step(folder.path, recorded=len(folder.metrics()), checkpoint_every=config.checkpoint_every)
        folder.go_on_after(step)
        return data, folder
    path = _folder(config)
    folder = RunFolder.create(path, dataclasses.replace(config, run_folder=path))
    held.callback(folder.close)
    return data, folder


def _folder(config: TrainConfig) -> Path:
    return config.run_folder or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
