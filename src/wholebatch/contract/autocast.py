"""The dtype of autocast around a loss, which its entry turns off and its products still need to know."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from .._base.autograd import device_types

_P = ParamSpec("_P")
_R = TypeVar("_R")

_around: ContextVar[dict[str, torch.dtype | None] | None] = ContextVar("autocast around a loss", default=None)


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
