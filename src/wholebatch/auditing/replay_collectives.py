"""Record the results of collectives, and replay them whatever the ranks put in.

A loss computed with replayed results depends on its rank's local rows alone, like a backward pass that stops at every
collective. Collectives are intercepted where torch dispatches them, so all of torch's names for them are covered.
Messages between two ranks (`send`, `recv`) are not intercepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._base.trees import tensors_of

_COLLECTIVES = ("allgather", "allreduce", "reduce_scatter", "alltoall", "broadcast", "scatter", "gather", "reduce_")


class Recording(TorchDispatchMode):
    """Record the results of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[list[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation; if it is a collective, wait for its result."""
        out = func(*args, **(kwargs or {}))
        if _is_collective(func):
            self._handle_outputs(_outputs(func, out, args))
        return out

    def _handle_outputs(self, outputs: list[Tensor]) -> None:
        self.results.append([x.detach().clone() for x in outputs])


class Replaying(Recording):
    """Replace the results of collectives by those of a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._next = iter(recording.results)

    def _handle_outputs(self, outputs: list[Tensor]) -> None:
        for x, before in zip(outputs, next(self._next), strict=True):
            x.detach().copy_(before)


def _is_collective(func: Any) -> bool:
    if func.namespace == "_c10d_functional":
        return not func.__name__.startswith(("wait_tensor", "_wrap"))
    return bool(func.namespace == "c10d") and func.__name__.lstrip("_").startswith(_COLLECTIVES)


def _outputs(func: Any, out: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that a collective has written, after waiting for it."""
    if func.namespace == "_c10d_functional":
        return [torch.ops._c10d_functional.wait_tensor(x) for x in tensors_of(out)]
    for x in out if isinstance(out, tuple) else (out,):
        if isinstance(x, torch.ScriptObject):
            x.wait()  # type: ignore[attr-defined]  # of torchbind
    return list(tensors_of(out)) or list(tensors_of(args[0]))
