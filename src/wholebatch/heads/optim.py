r"""Optimizers that update only the rows of a sparse gradient: the cost of a step grows with the sample of classes.

    SGD       b <- momentum b + (g + decay w),                        w <- w - lr b
    AdamW     m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2,  n <- n + 1
              w <- (1 - lr decay) w - lr m / (1 - beta1^n) / (sqrt(v / (1 - beta2^n)) + eps)

are PyTorch's formulas, with an n for each row. Unlike in a dense optimizer, a row without a gradient does not change:
momentum does not move it, it does not decay, and its n stays. With dense gradients both optimizers are PyTorch's. Some
rows are updated at a time (`pieces`), without temporaries of the gradient's size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from .._base.checks import (
    check_callable,
    check_flag,
    check_fraction,
    check_instance,
    check_items,
    check_sequence,
    check_weight,
    shown,
)
from .pieces import Piece, pieces


def initial_state(name: str, p: Tensor) -> Tensor:
    """Return the state of this name of a parameter whose rows have had no step."""
    return p.new_zeros(p.shape[:1], dtype=torch.float32) if name == "steps" else torch.zeros_like(p).detach()


class _SparseOptimizer(Optimizer, ABC):
    """The base of optimizers that update only the rows of a parameter that have a gradient."""

    row_state: tuple[str, ...]  # names of the state that has a row for each row of a parameter

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:  # as in torch
        self._check(defaults)
        super().__init__(check_items("params", params, "parameters, or of dicts of them"), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # as in torch
        """Add parameters with their own settings, checked like those of the constructor."""
        check_instance("param_group", param_group, dict, "a dict with 'params'")
        if "params" not in param_group:
            raise ValueError(f"param_group must be a dict with 'params', got the keys {[*param_group]}")
        self._check({name: param_group.get(name, value) for name, value in self.defaults.items()})
        super().add_param_group(param_group)

    def _check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError unless the settings are valid."""
        for name in ("lr", "momentum", "eps", "weight_decay"):
            if name in settings:
                check_weight(name, settings[name], "pass 0 or more")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step; a closure computes the loss again before it."""
        loss = None
        if closure is not None:
            check_callable("closure", closure)
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self._step(p, pieces(torch.atleast_1d(p.grad)), group)
        return loss

    @abstractmethod
    def _step(self, p: Tensor, parts: Iterator[Piece], group: dict[str, Any]) -> None:
        """Update the rows of one parameter that have a gradient."""


class SparseSGD(_SparseOptimizer):
    """SGD with momentum and weight decay, on rows that have a gradient.

    Args:
        params: parameters, or groups of them; sparse gradients are of their rows.
        lr: the learning rate.
        momentum: factor of a row's buffer of earlier gradients, applied in steps in which the row has a gradient.
        weight_decay: decay of a row, in steps in which it has a gradient.
        nesterov: look ahead, as in torch.optim.SGD.
    """

    row_state = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    def _check(self, settings: Mapping[str, Any]) -> None:
        super()._check(settings)
        if check_flag("nesterov", settings["nesterov"]) and not settings["momentum"]:
            raise ValueError("nesterov=True needs momentum above 0, got momentum=0")

    def _step(self, p: Tensor, parts: Iterator[Piece], group: dict[str, Any]) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        state = self.state[p] if momentum else {}
        if momentum and not state:
            state.update({name: initial_state(name, p) for name in self.row_state})
        buffer = torch.atleast_1d(state["momentum_buffer"]) if momentum else p
        for piece in parts:
            values, change = piece.take("values", torch.atleast_1d(p)), piece.grad
            if decay:
                change = torch.add(change, values, alpha=decay, out=piece.buffer("change"))
            if momentum:
                moved = piece.take("momentum", buffer).mul_(momentum).add_(change)
                piece.put(buffer, moved)
                nesterov = group["nesterov"]
                change = torch.add(change, moved, alpha=momentum, out=piece.buffer("change")) if nesterov else moved
            piece.put(p, values.add_(change, alpha=-group["lr"]))


class SparseAdamW(_SparseOptimizer):
    """AdamW on rows that have a gradient, each with the number of its own steps.

    Args:
        params: parameters, or groups of them; sparse gradients are of their rows.
        lr: the learning rate.
        betas: decay rates of the averages of a row's gradients, and of their squares.
        eps: added to the root of the average of squares.
        weight_decay: decay of a row, times lr, in steps in which it has a gradient.
    """

    row_state = ("exp_avg", "exp_avg_sq", "steps")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _check(self, settings: Mapping[str, Any]) -> None:
        super()._check(settings)
        betas = check_sequence("betas", settings["betas"], "two numbers in [0, 1)")
        if len(betas) != 2:
            raise ValueError(f"betas must be two numbers in [0, 1), got {shown(settings['betas'])}")
        for beta in betas:
            check_fraction("betas", beta, below_one=True)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state. The number of steps of each row stays float32, whatever the dtype of the parameter.

        torch casts state to the parameter's dtype, and bfloat16 does not hold each number above 256.
        """
        loaded: StateDict = {}
        # The last of the hooks, because each may replace the state.
        handle = self.register_load_state_dict_pre_hook(lambda _, state: loaded.update(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        keys = [key for group in loaded["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(keys, parameters, strict=True):
            if "steps" in loaded["state"].get(key, {}):
                self.state[p]["steps"] = loaded["state"][key]["steps"].to(p.device, torch.float32)

    def _step(self, p: Tensor, parts: Iterator[Piece], group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state.update({name: initial_state(name, p) for name in self.row_state})
        means, squares, counts = (torch.atleast_1d(state[name]) for name in self.row_state)
        for piece in parts:
            g = piece.grad
            mean = piece.take("mean", means).lerp_(g, 1 - beta1)
            square = piece.take("square", squares).mul_(beta2).addcmul_(g, g, value=1 - beta2)
            count = piece.take("count", counts).add_(1)
            for x, rows in ((means, mean), (squares, square), (counts, count)):
                piece.put(x, rows)
            n = count.to(torch.float64).view(-1, *[1] * (g.dim() - 1))
            first, second = ((1 - beta**n).to(p.dtype) for beta in (beta1, beta2))
            root = torch.div(square, second, out=piece.buffer("root")).sqrt_().add_(group["eps"])
            change = torch.div(mean, first, out=piece.buffer("change")).div_(root)
            values = piece.take("values", torch.atleast_1d(p)).mul_(1 - group["lr"] * group["weight_decay"])
            piece.put(p, values.add_(change, alpha=-group["lr"]))
