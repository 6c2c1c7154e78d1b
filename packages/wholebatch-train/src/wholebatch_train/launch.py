"""Start the ranks of a run: this process alone, local processes, or those of a launcher such as torchrun."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.app import UserError, cpus_of_a_rank, has_gpu_of_its_own, launcher_size, processor_name

from .audited import audit_start
from .config import TrainConfig
from .data.load import Data, load_data
from .data.loader import WorkerDiedError
from .data.pictures import FILE as LEFT_OUT
from .loop import train
from .option_checks import number_of_ranks
from .planned import plan_start
from .progress import Progress
from .ranks.all_ranks import device_of, on_all_ranks
from .ranks.local_ranks import RankDiedError, is_connection_error, one_line, run_local_ranks
from .ranks.signals import Requests, show
from .run.checkpoint import last_step
from .run.record import CONFIG, DataFacts, Extension, Schedule, Start, read_record
from .run.resume import how_to_resume
from .run.run_folder import RunFolder
from .tasks.chunking import with_chunk_size
from .tasks.make import check_encoders, make_task
from .tasks.precision import Precision

_VERSIONS = f"wholebatch {wb.__version__}, Python {platform.python_version()}, torch {torch.__version__}"


def run(config: TrainConfig) -> None:
    """Train with the ranks of the launcher, or else with those of the configuration.

    Raises:
        UserError: for a mistake in configuration, data, environment or run folder, on whichever rank it was found.
        Stopped: if a signal has ended the run.
    """
    size = number_of_ranks(config)
    if launcher_size() is not None:
        _run_launched_rank(config)
    elif size == 1:
        with closing(Requests()) as requests:
            _train_on_this_rank(config, _device(config, 0, 1), requests)
    else:
        if config.resume is not None:
            RunFolder.lock(config.resume).close()  # rank 0 locks it again; this refuses before ranks have started
        run_local_ranks(dataclasses.replace(config, run_folder=_folder(config)), _local_rank)


def _run_launched_rank(config: TrainConfig) -> None:
    """Run a process that torchrun, or another launcher, has started."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if local_size == int(os.environ["WORLD_SIZE"]):  # one machine, which can start as many without a launcher
        config = dataclasses.replace(config, ranks=local_size)
    with closing(Requests(announce=os.environ["RANK"] == "0")) as requests:
        try:
            _run_rank(config, "env://", requests, local_rank=local_rank, local_size=local_size)
        except Exception as error:
            if not is_connection_error(error):
                raise
            raise RankDiedError(
                f"rank {os.environ['RANK']} lost its connection to the others, one of which has probably ended "
                f"({one_line(error)}){requests.how_to_resume}"
            ) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _local_rank(config: TrainConfig, init_method: str, rank: int, launcher: Connection) -> None:
    """Run a process that `run_local_ranks` has started. A process that fails does not clean up.

    The other ranks would see that it is gone before it has reported its error.
    """
    requests = Requests(launcher, announce=False)
    _run_rank(config, init_method, requests, local_rank=rank, local_size=config.ranks)
    dist.destroy_process_group()


def _run_rank(config: TrainConfig, init_method: str, requests: Requests, *, local_rank: int, local_size: int) -> None:
    torch.set_num_threads(cpus_of_a_rank(local_size))
    device = _device(config, local_rank, local_size)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    others = "rank 0" if rank else f"the other {size - 1} of {size} ranks"
    place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    waiting = Timer(10, show, [f"rank {rank} waits for {others} at {place} (MASTER_ADDR, MASTER_PORT)"])
    if init_method == "env://":
        waiting.start()
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
    except dist.DistNetworkError as error:
        if not any(text in str(error) for text in ("failed to listen", "Ping failed")):
            raise
        raise UserError(
            f"MASTER_PORT must be a port where rank 0 alone listens: {place} (MASTER_ADDR, MASTER_PORT) is in use or "
            f"answered by another program ({one_line(error)}); choose another MASTER_PORT, the same on all ranks"
        ) from error
    finally:
        waiting.cancel()
    _train_on_this_rank(config, device, requests)


def _device(config: TrainConfig, local_rank: int, local_size: int) -> torch.device:
    if has_gpu_of_its_own() and torch.cuda.device_count() == 1:
        local_rank, local_size = 0, 1
    return device_of(config.device, local_rank, local_size)


def _train_on_this_rank(asked: TrainConfig, device: torch.device, requests: Requests) -> None:
    """Load the data, prepare the run folder on rank 0, train, report. A mistake on any rank ends all ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    is_first = rank == 0
    Precision(asked.precision, device)  # refuses what the device does not have
    progress = Progress(is_quiet=not is_first)
    with ExitStack() as held:
        (config, data, folder, _), first = _agree(lambda: _prepare(asked, size, held, progress, is_first=is_first))
        path, done = Path(first["folder"]), first["step"]
        extensions = tuple(Extension(*each) for each in first["extensions"])
        schedule = Schedule(config.steps, config.warmup_steps, extensions)
        requests.device, requests.how_to_resume = device, how_to_resume(path, config)
        if folder is not None:
            progress.say(f"run folder: {folder.path}")
        config = with_chunk_size(config, data, device, rank=rank, size=size)
        plan = plan_start(config, data, device, size=size)
        progress.say(plan)
        audit = None
        if config.audit and config.resume is None:
            audit = str(audit_start(config, data, device, rank=rank, size=size))
            progress.say(audit)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        start = Start(now, done, size, name, _VERSIONS, plan, audit)
        task = make_task(dataclasses.replace(config, steps=schedule.steps), data, device, rank=rank, size=size)
        try:
            report = train(
                config, task, path, folder, progress, requests, schedule=schedule, start=start, device=device
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise UserError(
                f"rank {rank} of {size} is out of memory: {one_line(error) or type(error).__name__}. "
                "--chunk-size N encodes N rows at a time, for the same gradient"
            ) from error
        except WorkerDiedError as error:
            raise RankDiedError(
                f"a process that reads the data for rank {rank} of {size} {error}{requests.how_to_resume}"
            ) from error
        if folder is not None:
            progress.report(path, config, task, report)


_Prepared = tuple[TrainConfig, Data, RunFolder | None, dict[str, Any]]
"""The configuration with the choices that were left to the data; the data; on rank 0 the folder; what the ranks tell
each other: the digest of the data, and rank 0 the folder, the steps made before and where the run was extended."""


def _agree(prepare: Callable[[], _Prepared]) -> tuple[_Prepared, dict[str, Any]]:
    """Return the local result of `prepare`, and what rank 0 tells, once all have succeeded, with the same data."""
    prepared, everyone = on_all_ranks("set-up", prepare, itemgetter(-1), patient=True)
    for rank, told in enumerate(everyone):
        if told["data"] != everyone[0]["data"]:
            raise UserError(
                f"--data holds other rows on rank {rank} than on rank 0; every machine needs the same files"
            )
    return prepared, everyone[0]


def _prepare(config: TrainConfig, size: int, held: ExitStack, progress: Progress, *, is_first: bool) -> _Prepared:
    """Load the data on every rank, then create the folder on rank 0, so that a mistake in the data leaves no folder.

    A resumed run has its folder, which rank 0 locks before it reads anything.
    """
    folder, step, extensions = None, 0, tuple[Extension, ...]()
    if is_first and config.resume is not None:
        folder = RunFolder.lock(config.resume)
        held.callback(folder.close)
    config, data = load_data(config, size, progress.say_of_data)
    check_encoders(config, data)
    rows = data[0] if isinstance(data, tuple) else data
    facts = DataFacts(config.data, rows.summary, rows.digest)
    if folder is not None:
        record = read_record(folder.path)
        if record.data.digest != rows.digest:
            raise UserError(
                f"--resume continues with the data of the run: {record.data.source!r} held {record.data}, and holds "
                f"{facts} now. Restore the data, or start a new run"
            )
        step = last_step(folder.path, recorded=len(folder.metrics()), checkpoint_every=config.checkpoint_every)
        folder.resume_after(step)
        extensions = _extensions(config, record.extensions, step)
    elif is_first:
        path = _folder(config)
        folder = RunFolder.create(path, dataclasses.replace(config, run_folder=path.absolute()), facts, rows.left_out)
        held.callback(folder.close)
        if rows.left_out:
            progress.say_of_data(f"{path / LEFT_OUT} lists the {len(rows.left_out):,} rows that are left out")
    place = "" if folder is None else str(folder.path)
    told = {"data": rows.digest, "folder": place, "step": step, "extensions": [[*each] for each in extensions]}
    return config, data, folder, told


def _extensions(config: TrainConfig, earlier: tuple[Extension, ...], step: int) -> tuple[Extension, ...]:
    """Return the extensions of a resumed run, and the one that `--until-step` asks for."""
    if earlier and earlier[-1].at > step:
        raise UserError(
            f"{CONFIG} of the run extends it at step {earlier[-1].at}, but its checkpoint is of step {step}; was an "
            "earlier checkpoint copied back?"
        )
    if config.until_step is None:
        return earlier
    if step == 0:
        raise UserError(f"--until-step {config.until_step}: the run has no checkpoint yet; start one with --steps")
    if config.until_step < step:
        raise UserError(f"--until-step must be at least {step}, the steps made so far; got {config.until_step}")
    return Schedule(config.steps, config.warmup_steps, earlier).extended(step, config.until_step).extensions


def _folder(config: TrainConfig) -> Path:
    return config.run_folder or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
