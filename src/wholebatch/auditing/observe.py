"""Hooks that observe a step: the gradient of every backward pass, and the calls of the model that received one.

Hooks on parameters see each gradient before an engine reduces it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._base.trees import tensors_of
from .problem import Problem, parameters


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
