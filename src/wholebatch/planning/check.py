"""Check predictions on this machine: run one setting of a loss on the planned number of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

from .._base.user_error import UserError
from .._launch.processes import run_processes
from .._measure import map_each_tensor, rise_of_peak, seconds_of, threads_of_a_rank
from ..comm import Communicator, select_communicator
from ..sweep import Memory
from .calibration import calibrate
from .counted import work_of
from .rates import Rates
from .shapes import ExchangeUsed, Shapes
from .sizes import LossName
from .subject import make_step

_STEPS = 3
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Measured:
    """The prediction and the measurement of a setting."""

    shapes: Shapes  # its batch may be smaller than the plan's
    exchange: ExchangeUsed
    memory: Memory  # the value of `memory=`
    predicted_bytes: int  # at the peak of the loss, without features and gradients
    bytes: int | None  # None where the system does not report them
    predicted_seconds: float  # of a step
    seconds: float


def check_gpus(option: str, device: str, ranks: int) -> None:
    """Raise UserError if the device is a GPU, and there is none for each rank; `option` asks for them."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < ranks:
        raise UserError(f"{option} needs a GPU for each of {ranks} ranks, and there are {gpus}")


def rates_here(losses: tuple[LossName, ...], ranks: int, *, dtype: torch.dtype, device: str) -> Rates:
    """Calibrate on `ranks` new processes; raise RankError if one fails."""
    return run_processes(
        _calibrate, ranks, losses, ranks, dtype, device, backend=_backend(device), timeout_s=_PATIENCE_S
    )[0]


def check(shapes: Shapes, exchange: ExchangeUsed, memory: Memory, rates: Rates, *, within_s: float) -> Measured:
    """Run a setting, with half of the batch, a quarter, ... if the rates predict that all steps take longer.

    Raises:
        RankError: if a process fails.
    """
    share, kept_size, _ = shapes.kept(memory)
    while True:
        work = work_of(shapes, exchange, memory)
        predicted = rates.seconds(shapes.loss, shapes.embedding_size, work)
        if (_STEPS + 3) * predicted <= within_s or shapes.batch_size < 2 * shapes.ranks:
            break
        shapes = replace(shapes, batch_size=shapes.batch_size // 2)
        if share:  # as large a part is kept
            flat = shapes.memory_for(0)
            memory = flat + int((shapes.memory_for(kept_size) - flat) * share)
    arguments, backend = (shapes, exchange, memory), _backend(shapes.device)
    took = run_processes(_time, shapes.ranks, *arguments, backend=backend, timeout_s=_PATIENCE_S)[0]
    rise = run_processes(rise_of_a_step, shapes.ranks, *arguments, backend=backend, timeout_s=_PATIENCE_S)[0]
    return Measured(*arguments, work.loss, rise, predicted, took)


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def device_of_a_rank(device: str) -> torch.device:
    """Return the CPU, or this rank's GPU, which becomes torch's current one."""
    if device != "cuda":
        return torch.device("cpu")
    gpu = torch.device("cuda", select_communicator(None).rank)
    torch.cuda.set_device(gpu)
    return gpu


def _calibrate(losses: tuple[LossName, ...], ranks: int, dtype: torch.dtype, device: str) -> Rates:
    torch.set_num_threads(threads_of_a_rank(ranks))
    return calibrate(select_communicator(None), losses, dtype=dtype, device=device_of_a_rank(device))


def _time(shapes: Shapes, exchange: ExchangeUsed, memory: Memory) -> float:
    comm, device, step = _run_first_step(shapes, exchange, memory)
    return median(seconds_of(comm, step, device) for _ in range(_STEPS))


def rise_of_a_step(shapes: Shapes, exchange: ExchangeUsed, memory: Memory) -> int | None:
    """Return the rise of the peak in a second step, in a process whose heap is empty."""
    map_each_tensor()
    comm, device, step = _run_first_step(shapes, exchange, memory)
    return rise_of_peak(comm, step, device)


def _run_first_step(
    shapes: Shapes, exchange: ExchangeUsed, memory: Memory
) -> tuple[Communicator, torch.device, Callable[[], None]]:
    """Return ranks, device, and a step that has run once, so that libraries are loaded and threads started."""
    torch.set_num_threads(threads_of_a_rank(shapes.ranks))
    comm, device = select_communicator(None), device_of_a_rank(shapes.device)
    step = make_step(comm, shapes, exchange, memory, device)
    step()
    return comm, device, step
