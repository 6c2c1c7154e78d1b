"""Measure the time and memory of a step, and the share of the machine that a rank may take."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ._launch.cpus import cpus_of_a_rank
from .comm import Communicator

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # for _CLEAR: the peak starts again from what is resident now
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # as mallopt calls them
_CPU = torch.device("cpu")


def seconds_of(comm: Communicator, step: Callable[[], object], device: torch.device = _CPU) -> float:
    """Return a step's seconds on the slowest rank; all ranks start together. Collective."""
    comm.all_reduce(torch.zeros(1, device=device), check=False)
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    return comm.all_reduce(took, "max", check=False).item()


def rise_of_peak(comm: Communicator, step: Callable[[], object], device: torch.device = _CPU) -> int | None:
    """Return the bytes by which a step raises the peak memory, on the rank with most; None if it cannot be measured.

    On a GPU this is allocated memory, on a CPU resident memory. Collective.
    """
    if device.type == "cpu" and not _CLEAR.exists():
        step()
        return None
    before = reset_peak(device)
    step()
    rise = peak(device) - before
    return int(comm.all_reduce(torch.tensor(rise, device=device), "max", check=False).item())


def reset_peak(device: torch.device = _CPU) -> int:
    """Let the peak start again from the memory that is held now, and return its bytes."""
    gc.collect()
    if device.type == "cuda":
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)  # return memory that earlier steps have freed, so that it counts again
    _CLEAR.write_text(_RESET_PEAK)
    return _resident("VmRSS")


def peak(device: torch.device = _CPU) -> int:
    """Return the most bytes that were held since `reset_peak`."""
    if device.type == "cuda":
        _synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _resident("VmHWM")


def map_each_tensor() -> None:
    """From now on, return a freed tensor's memory to the system at once, so that resident memory is that of tensors.

    glibc by itself does so for tensors above 32 MB, and takes smaller ones from a heap that keeps some of their memory.
    Without glibc nothing changes.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            option(name, 2**17)


def threads_of_a_rank(ranks: int) -> int:
    """Return each rank's share of the cores that this process may use."""
    return cpus_of_a_rank(ranks)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated; None on a system that does not report them.

    On a GPU the allocator's reserve counts as free; on a CPU the limit of the cgroup counts.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if device.type != "cpu" or not meminfo.exists():
        return None
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    limit, usage = group / "memory.max", group / "memory.current"
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(usage.read_text()))
    return max(free, 0)


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
