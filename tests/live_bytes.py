"""The bytes that tensors hold at a time, as PyTorch's own allocator counts them.

What the system calls resident depends on its allocator, on pages that nobody has returned yet, on threads and on what
else the machine does. These figures depend on the program alone.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_MARK = 7919  # bytes of a tensor that shows where the step begins


def peak_of(step: Callable[[], object], *, after: Callable[[], object] = lambda: None) -> int:
    """The most bytes of the CPU's memory that a step holds at a time, beside those that are held when it begins.

    Args:
        step: what is looked at.
        after: is called before, and counted: memory that it leaves and the step frees is subtracted. Memory that is
            older than this is not.
    """
    with _without_messages(), tempfile.TemporaryDirectory() as folder:
        # acc_events: torch 2.11 warns without it.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            after()
            torch.empty(_MARK, dtype=torch.uint8)
            step()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    of_memory = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    of_memory.sort(key=lambda event: event["args"]["Ev Idx"])
    sizes, totals = ([event["args"][name] for event in of_memory] for name in ("Bytes", "Total Allocated"))
    begin = sizes.index(_MARK)
    # A running total, which also knows of what is freed by threads that the profiler does not see, as gloo's.
    return max(totals[begin:]) - totals[begin]


@contextmanager
def _without_messages() -> Iterator[None]:
    """Kineto tells the standard error, whatever its log level, that it starts."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
