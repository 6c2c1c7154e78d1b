"""The learned factor of the logits, in a form that trainers' engines take: a logarithm of shape (1,), with a limit.

    s = min(exp(w), max)

A logarithm keeps s positive whatever an optimizer does. Where s is at its limit, the gradient of min() is zero, and s
would stay there. So the gradient is that of exp(w), except that a step may not raise w any further (a projected
gradient: zero if it points out of the allowed range):

    dL/dw = s dL/ds               below the limit
    dL/dw = max(s dL/ds, 0)       at the limit
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ._base.checks import check_positive_number

_WHY = "it is a scale, such as 1 / 0.07, not its logarithm"


class Scale(nn.Module):
    r"""A learned scale of logits, positive and limited: s = min(exp(w), max).

    The gradient is s dL/ds, and at the limit max(s dL/ds, 0): a step may lower the scale, not raise it. A backward pass
    decides this by the gradient that it brings, so call the module once for each loss, and let `sync="mean"` or one
    process give that gradient in full. Below the limit no such care is needed.

    The parameter `log_scale` has shape (1,), since FSDP2 and DeepSpeed do not take parameters of shape (). Put the
    module inside the model that an engine wraps, and return its value from the model's forward; optimizers should not
    apply weight decay to it. `load_state_dict` takes a logarithm of shape (), too.

    Args:
        init: the first scale, not its logarithm: 1 / 0.07 for CLIP.
        max: the limit; `math.inf` for none.

    Raises:
        ValueError: if init or max is not a positive number, or init is larger than max.

    Source: Radford et al., 2021, arXiv:2103.00020, section 2.5: a scale as the exponential of a parameter, at most 100.

    >>> import wholebatch as wb
    >>> scale = wb.Scale(1 / 0.07)
    >>> scale.log_scale.shape, scale().shape
    (torch.Size([1]), torch.Size([]))
    >>> round(scale().item(), 4)
    14.2857
    """

    def __init__(self, init: float, max: float = 100.0) -> None:
        super().__init__()
        check_positive_number("init", init, _WHY)
        if not (isinstance(max, float) and max == math.inf):
            check_positive_number("max", max, _WHY)
        if init > max:
            raise ValueError(
                f"init must be at most max, got init={init} and max={max}; init is the scale, such as 14.3, and max is "
                "its limit (math.inf for none)"
            )
        self.max = float(max)
        self.log_scale = nn.Parameter(torch.tensor([math.log(init)]))
        self.register_load_state_dict_pre_hook(_as_one_entry)

    def forward(self) -> Tensor:
        """Return the scale, of shape ()."""
        limited: Tensor = _LimitedExp.apply(self.log_scale, self.max)
        return limited.sum()  # of one entry; a view would make FSDP2 warn

    def extra_repr(self) -> str:
        return f"max={self.max:g}"


def _as_one_entry(_scale: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    """Take a logarithm of shape (), as other programs save it, for one of shape (1,)."""
    if getattr(state.get(name := f"{prefix}log_scale"), "shape", None) == ():
        state[name] = state[name].reshape(1)


class _LimitedExp(torch.autograd.Function):
    """min(exp(w), max), with the gradient of exp(w) that does not raise w at the limit."""

    @staticmethod
    def forward(w: Tensor, limit: float) -> Tensor:
        return w.exp().clamp(max=limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        w, limit = inputs
        ctx.save_for_backward(output, w >= math.log(limit))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        scale, at_limit = ctx.saved_tensors
        grad = grads[0] * scale
        return torch.where(at_limit, grad.clamp(min=0), grad), None
