"""Functions that run outside of compiled graphs, without importing Dynamo before the program compiles.

`torch.compiler.disable` imports `torch._dynamo` when it decorates: 1.5 s and 80 MB for programs that never compile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # torch.compile sets it; it imports no Dynamo

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(function: Callable[_P, _R], reason: str) -> Callable[_P, _R]:
    """Wrap a function so that it breaks the graph of a compiled caller; `fullgraph=True` reports the `reason`.

    Outside of compiled calls the function is called directly.
    """
    skipped = _skipped(function, reason)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # When Dynamo traces this, it takes the first condition to be true, and does not read the second.
        if torch.compiler.is_dynamo_compiling() or get_eval_frame_callback():
            return skipped(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _skipped(function: Callable[_P, _R], reason: str) -> Callable[_P, _R]:
    """Wrap a function so that Dynamo skips it.

    torch has a private decorator that imports `torch._dynamo` at the first call. It takes no reason, so the reason is
    set where Dynamo reads it. Where torch lacks it, the public decorator is used, which imports at once.
    """
    lazily: Any = getattr(torch, "_disable_dynamo", None)
    if lazily is None:
        return torch.compiler.disable(function, reason=reason)
    skipped: Any = lazily(function)
    skipped._torchdynamo_disable, skipped._torchdynamo_disable_msg = True, reason
    return skipped
