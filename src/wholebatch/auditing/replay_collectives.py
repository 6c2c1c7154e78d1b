"""Communication held fixed: what collectives gave once is given again, whatever ranks put in.

A loss computed so depends on its own rank's rows alone, as a backward pass sees it that stops at every collective. The
calls are caught where torch dispatches them, so it does not matter by which of torch's many names they were made.
Messages between two ranks (`send`, `recv`) are let through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..gradcache.inputs import tensors_of

_COLLECTIVES = ("allgather", "allreduce", "reduce_scatter", "alltoall", "broadcast", "scatter", "gather", "reduce_")


class Recording(TorchDispatchMode):
    """Inside, what collectives give is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and if it is a collective, let it end."""
        out = func(*args, **(kwargs or {}))
        if _is_collective(func):
            self._gave(_outputs(func, out, args))
        return out

    def _gave(self, outputs: list[Tensor]) -> None:
        self.given.append([x.detach().clone() for x in outputs])


class Replaying(Recording):
    """Inside, collectives give what they gave in a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._next = iter(recording.given)

    def _gave(self, outputs: list[Tensor]) -> None:
        for x, before in zip(outputs, next(self._next), strict=True):
            x.detach().copy_(before)


def _is_collective(func: Any) -> bool:
    if func.namespace == "_c10d_functional":
        return not func.__name__.startswith(("wait_tensor", "_wrap"))
    return bool(func.namespace == "c10d") and func.__name__.lstrip("_").startswith(_COLLECTIVES)


def _outputs(func: Any, out: Any, args: Sequence[Any]) -> list[Tensor]:
    """The tensors that a collective has written, once it has."""
    if func.namespace == "_c10d_functional":
        return [torch.ops._c10d_functional.wait_tensor(x) for x in tensors_of(out)]
    for x in out if isinstance(out, tuple) else (out,):
        if isinstance(x, torch.ScriptObject):
            x.wait()  # type: ignore[attr-defined]  # of torchbind
    return list(tensors_of(out)) or list(tensors_of(args[0]))
