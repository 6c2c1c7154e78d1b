"""The device: the time and memory of a call, also in a CUDA graph; the card, the versions and the commit."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from wholebatch._base.third_party import version

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
Row = dict[str, Any]
_T = TypeVar("_T")


class SkippedError(Exception):
    """A stage cannot run here; the message says what is missing."""


def relative(result: Tensor, true: Tensor) -> float:
    """Return the relative error of a tensor, in the Euclidean norm."""
    result, true = result.double(), true.double().to(result.device)
    return ((result - true).norm() / true.norm()).item()


def message(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:300]


def seconds_of(call: Callable[[], object]) -> float:
    """Return the time of one call; on a GPU that between two events."""
    if not GPU:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def median_seconds(call: Callable[[], object], within_s: float = 0.3) -> float:
    """Return the median time of 5 to 50 calls, about as many as `within_s` allows, after two calls that warm up."""
    call()
    first = seconds_of(call)
    return median(seconds_of(call) for _ in range(max(5, min(50, int(within_s / first)))))


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


def captured(call: Callable[[], _T]) -> tuple[Callable[[], None], _T]:
    """Capture a call in a CUDA graph; return a function that replays it, and the call's result, which replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def about() -> Row:
    """Return the card, the versions and the commit."""
    commit, changes = _printed("git", "rev-parse", "--short", "HEAD"), _printed("git", "status", "--porcelain", "-uno")
    return {
        "card": torch.cuda.get_device_name() if GPU else "no GPU: small sizes on the CPU, times mean nothing",
        "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": f"{commit or 'unknown'}{'-changed' if changes else ''}",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: version(name) for name in ("triton", "numpy")},
    }


def name_of(facts: Row) -> str:
    """Return the part of a file's name that says on which card and commit its figures were measured."""
    card = facts["card"].replace("NVIDIA ", "") if GPU else "cpu"
    return f"{card}_{facts['commit']}".lower().replace(" ", "-")


def _printed(*command: str) -> str | None:
    """Return the output of a program; None if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
