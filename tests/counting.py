"""Count the work of the host in a call: PyTorch's operations, and Python's calls; that of kernels is left out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from wholebatch.kernels import launch
from wholebatch.sweep import Products

_COMPUTE_NOTHING = {
    "view", "slice", "unsqueeze", "expand", "detach", "t", "transpose", "select", "alias", "split", "unbind",
    "permute", "squeeze", "as_strided", "empty", "new_empty",
}  # fmt: skip


class _Operations(TorchDispatchMode):
    """Count operations that compute something."""

    count = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in _COMPUTE_NOTHING
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """Return the operations and Python's calls in a call of a function, which is made twice.

    A product counts as one operation, whatever a CPU does beside it. Launches of kernels happen, and are not counted.
    """
    calls, paused = 0, False
    run, multiply = launch.run, Products._multiply

    def count(_frame, event, _arg):
        nonlocal calls
        calls += not paused and event in ("call", "c_call")

    def uncounted_run(*args, **constants):
        nonlocal paused
        paused = True
        with _disable_current_modes():
            run(*args, **constants)
        paused = False

    def one_operation(*args, **more):
        operations.count += 1
        with _disable_current_modes():
            multiply(*args, **more)

    with patch.object(launch, "run", uncounted_run):
        threading.setprofile(count)
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        # The mode comes last: it makes Python forget which classes are sequences, and look again in the next call.
        with patch.object(Products, "_multiply", one_operation), _Operations() as operations:
            call()
    return operations.count, calls
