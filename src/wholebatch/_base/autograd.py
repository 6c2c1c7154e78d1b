"""Decorators: run a function outside of compiled graphs, or without autocast; differentiate a node once only.

Products of a loss still need to know the dtype of the autocast around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # torch.compile sets it; it imports no Dynamo
from torch.autograd import Function

_P = ParamSpec("_P")
_R = TypeVar("_R")
_around: ContextVar[dict[str, torch.dtype | None] | None] = ContextVar("autocast around a loss", default=None)


def outside_graphs(
    function: Callable[_P, _R],
    reason: str,
    inside: Callable[[Callable[_P, _R], tuple[Any, ...], dict[str, Any]], _R | None] | None = None,
) -> Callable[_P, _R]:
    """Wrap a function so that it breaks the graph of a compiled caller; `fullgraph=True` reports the `reason`.

    `inside(function, args, kwargs)`, if given, makes it a part of the graph instead, and returns its result; None: it
    cannot. Dynamo traces that, but not the function. Outside of compiled calls the function is called directly.
    """
    skipped = _skipped(function, reason)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():  # when Dynamo traces this, it reads no further
            result = None if inside is None else inside(skipped, args, kwargs)
            if result is not None:
                return result
            return skipped(*args, **kwargs)
        if get_eval_frame_callback():
            return skipped(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _skipped(function: Callable[_P, _R], reason: str) -> Callable[_P, _R]:
    """Wrap a function so that Dynamo skips it, without importing Dynamo before the program compiles: 1.5 s and 80 MB.

    torch has a private decorator that imports `torch._dynamo` at the first call. It takes no reason, so the reason is
    set where Dynamo reads it. Where torch lacks it, the public decorator is used, which imports at once.
    """
    lazily: Any = getattr(torch, "_disable_dynamo", None)
    if lazily is None:
        return torch.compiler.disable(function, reason=reason)
    skipped: Any = lazily(function)
    skipped._torchdynamo_disable, skipped._torchdynamo_disable_msg = True, reason
    return skipped


def no_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate the forward or the backward of a Function: it runs without autocast, and outside of compiled graphs.

    In a compiled training step Dynamo would trace the backward of a loss, for seconds, although the loss itself is
    outside.
    """
    return outside_graphs(without_autocast(function), "wholebatch computes this outside the compiled graph")


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function to run without autocast, on every device type that one of its tensors is on.

    `autocast_around` remembers its dtype; a function inside another keeps the outer one's.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with _autocast_off({arg.device.type for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)}):
            return function(*args, **kwargs)

    return run


@contextmanager
def _autocast_off(devices: set[str]) -> Iterator[None]:
    """Switch autocast off inside, and remember its dtypes on these devices, unless a function outside has."""
    around = _around.get()
    token = _around.set({device: _dtype(device) for device in devices} if around is None else around)
    try:
        with ExitStack() as off:
            for device in devices or {"cpu"}:
                if torch.amp.is_autocast_available(device):  # not for tensors without data: entry validation refuses
                    off.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        _around.reset(token)


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


def autocast_around(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast rounds products on a device around this loss; None: it was off."""
    around = _around.get()
    return None if around is None else around.get(device.type)


def _dtype(device: str) -> torch.dtype | None:
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


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
