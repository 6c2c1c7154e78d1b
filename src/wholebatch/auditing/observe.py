"""Observe a step: the gradients of every backward pass, the model's calls, and the results of collectives.

Hooks on parameters see each gradient before an engine reduces it. Collectives are intercepted where torch dispatches
them, so all of torch's names for them are covered. A loss computed with replayed results depends on its rank's local
rows alone, like a backward pass that stops at every collective. Messages between two ranks (`send`, `recv`) are not
intercepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .._base.trees import tensors_of
from .problem import Problem, parameters

_COLLECTIVES = ("allgather", "allreduce", "reduce_scatter", "alltoall", "broadcast", "scatter", "gather", "reduce_")


class Observer:
    """Record gradients and calls of one step.

    Attributes:
        total: by parameter, the sum over backward passes.
        last: by parameter, the gradient of the last backward pass.
        passes: by parameter, the number of backward passes that reached it.
        calls: for each call of the model with gradients on, whether its output received one.
    """

    def __init__(self, problem: Problem) -> None:
        self.total: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.passes: dict[str, int] = {}
        self.calls: list[bool] = []
        for name, p in parameters(problem).items():
            if p.requires_grad:
                p.register_hook(lambda grad, name=name: self._add(name, grad))
        problem.model.register_forward_hook(self._called)

    def _add(self, name: str, grad: Tensor) -> None:
        grad = grad.detach().to_dense() if grad.is_sparse else grad.detach().clone()
        self.last[name] = grad
        self.total[name] = self.total[name] + grad if name in self.total else grad
        self.passes[name] = self.passes.get(name, 0) + 1

    def _called(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        outputs = [x for x in tensors_of(output) if x.requires_grad and x.grad_fn is not None]
        if not torch.is_grad_enabled() or not outputs:
            return
        number = len(self.calls)
        self.calls.append(False)

        def received(grad: Tensor) -> None:
            self.calls[number] = self.calls[number] or bool(grad.count_nonzero())

        for x in outputs:
            if x.numel() > 1:  # a returned scale does not count
                x.register_hook(received)


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
