"""Decorators: a second derivative of an autograd node raises, and autocast is off inside of it and of a loss.

Products of a loss still need to know the dtype of the autocast around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from .graph_break import outside_graphs

_P = ParamSpec("_P")
_R = TypeVar("_R")
_around: ContextVar[dict[str, torch.dtype | None] | None] = ContextVar("autocast around a loss", default=None)


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate the backward of a Function: a second derivative raises a RuntimeError.

    torch's decorator of this name detaches the gradients where no incoming gradient requires one, which is the usual
    case (`create_graph=True` on a plain loss): a gradient penalty would then silently lose its gradient.
    """

    def wrapper(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        anchor = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
        return tuple(_Constant.apply(x, *anchor) if isinstance(x, Tensor) else x for x in results)

    return wrapper


def no_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function to run without autocast, on every device type that one of its tensors is on.

    It also runs outside of compiled graphs: in a compiled training step Dynamo would trace the backward of a loss, for
    seconds, although the loss itself is outside.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with ExitStack() as without_autocast:
            for device in device_types(args, kwargs) or {"cpu"}:
                if torch.amp.is_autocast_available(
                    device
                ):  # not for tensors without data: entry validation refuses them
                    without_autocast.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return outside_graphs(run, "wholebatch computes this outside the compiled graph")


def remember_autocast(loss: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate the entry of a loss, outside of `no_autocast`; a loss inside another keeps the outer one's."""

    @wraps(loss)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled() or _around.get() is not None:
            return loss(*args, **kwargs)
        token = _around.set({device: _dtype(device) for device in device_types(args, kwargs)})
        try:
            return loss(*args, **kwargs)
        finally:
            _around.reset(token)

    return call


def autocast_around(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast rounds products on a device around this loss; None: it was off."""
    around = _around.get()
    return None if around is None else around.get(device.type)


def _dtype(device: str) -> torch.dtype | None:
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def device_types(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
    """Return the types of the devices on which tensors among a call's arguments are."""
    return {arg.device.type for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)}


class _Constant(Function):
    """The identity on a gradient; its derivative by any tensor that the gradient depends on is an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *depends_on: Tensor) -> Tensor:
        return x.detach() if x.is_sparse else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(
            "this can be differentiated once: its gradient has no gradient (double backward). For second derivatives "
            "of a loss use wholebatch.reference on the gathered batch, e.g. wholebatch.WholeBatch(reference loss)"
        )
