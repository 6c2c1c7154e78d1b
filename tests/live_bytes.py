"""The bytes that tensors hold at a time, as PyTorch's allocator counts them.

The system's resident size depends on its allocator, on pages that are not returned yet, on threads and on other work of
the machine. These figures depend on the program alone.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_MEMORY_EVENT = re.compile(r'\{[^{}]*"name": "\[memory\]"[^{}]*\{[^{}]*\}[^{}]*\}')
_MARK = 7919  # bytes of a tensor that shows where the step begins


def peak_of(step: Callable[[], object], *, after: Callable[[], object] = lambda: None, times: int = 1) -> int:
    """Return the most bytes of CPU memory that a step holds at a time, beyond those that are held when it begins.

    Args:
        step: the function to measure.
        after: a function that runs before the step and is counted: memory that it leaves and the step frees is
            subtracted. Memory that is older is not.
        times: of the step, of which the least counts. The profiler does not see that another thread drops the last
            reference to a tensor, as gloo's threads do with one that they have sent, if they are late: the tensor then
            counts until the end.
    """
    with _without_messages(), tempfile.TemporaryDirectory() as folder:
        # Without acc_events, which makes a Python object of each event: that takes longer than the steps.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            after()
            for _ in range(times):
                torch.empty(_MARK, dtype=torch.uint8)
                step()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = map(json.loads, _MEMORY_EVENT.findall(path.read_text()))  # to decode all takes longer than a step
    of_memory = [event for event in events if event["args"]["Device Type"] == 0]
    of_memory.sort(key=lambda event: event["args"]["Ev Idx"])
    sizes, totals = ([event["args"][name] for event in of_memory] for name in ("Bytes", "Total Allocated"))
    begins = [at for at, size in enumerate(sizes) if size == _MARK]
    ends = [*begins[1:], len(totals)]
    return min(max(totals[begin:end]) - totals[begin] for begin, end in zip(begins, ends, strict=True))


@contextmanager
def _without_messages() -> Iterator[None]:
    """Suppress the message that Kineto prints at its start, at any log level, and the warning of torch 2.11."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
