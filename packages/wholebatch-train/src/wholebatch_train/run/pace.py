"""The figures of a run's speed and memory: each is another one when the run is repeated."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

MEASURED = ("seconds", "examples_per_second", "peak_rss_bytes", "peak_cuda_bytes")
"""Fields of metrics.jsonl that differ between two runs with the same numbers."""
_WINDOW = 20  # steps
_STATUS = Path("/proc/self/status")


class Pace:
    """The rate of the last steps of this process, validations and checkpoints among them.

    Args:
        batch_size: examples in a step.
        clock: the time in seconds.
    """

    def __init__(self, batch_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._batch_size, self._clock = batch_size, clock
        self._ends = deque([clock()], maxlen=_WINDOW + 1)

    def step(self) -> float:
        """Return the examples per second over the last steps, once one more is complete."""
        self._ends.append(self._clock())
        passed = self._ends[-1] - self._ends[0]
        return self._batch_size * (len(self._ends) - 1) / max(passed, 1e-9)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the most bytes that this process has held so far, in its memory and on its GPU, where they are known."""
    peaks = {}
    if (resident := _peak_resident()) is not None:
        peaks["peak_rss_bytes"] = resident
    if device.type == "cuda":
        peaks["peak_cuda_bytes"] = torch.cuda.max_memory_allocated(device)
    return peaks


def _peak_resident() -> int | None:
    if _STATUS.exists():  # getrusage's peak includes that of the program that has started this one
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return None
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
