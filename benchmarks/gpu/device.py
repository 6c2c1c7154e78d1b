"""The device of all stages: random features on it, the time and memory of a call, and installed packages."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
Row = dict[str, Any]


class SkippedError(Exception):
    """A stage cannot run here; the message says what is missing."""


def has(module: str) -> bool:
    """Return whether a module is installed."""
    return importlib.util.find_spec(module) is not None


def interprets() -> bool:
    """Return whether Triton's interpreter runs kernels here: Triton 3.6's does not with NumPy 2.4 or later."""
    if GPU or not (has("triton") and has("numpy")):
        return False
    numpy = tuple(int(number) for number in version("numpy").split(".")[:2])
    return not version("triton").startswith("3.6.") or numpy < (2, 4)


def unit_rows(rows: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random features of length 1."""
    return F.normalize(torch.randn(rows, size, device=DEVICE), dim=1).to(dtype)


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def relative(found: Tensor, true: Tensor) -> float:
    """Return the relative error of a tensor, in the Euclidean norm."""
    found, true = found.double(), true.double().to(found.device)
    return ((found - true).norm() / true.norm()).item()


def under_autocast(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function under autocast to bfloat16."""

    def inside(*args: Any) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return call(*args)

    return inside


def seconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Return the median time of a call; on a GPU between events, after two calls that warm up."""
    times = []
    for number in range(repeats + 2):
        if GPU:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            taken = begin.elapsed_time(end) / 1000
        else:
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
        if number >= 2:
            times.append(taken)
    return median(times)


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Return the rise of the allocator's peak during a call; None on a CPU."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def forget(*leaves: Tensor) -> None:
    """Drop the gradients of earlier steps."""
    for leaf in leaves:
        leaf.grad = None
