"""Functions that run outside compiled graphs, and no Dynamo before somebody compiles.

`torch.compiler.disable` imports `torch._dynamo` when it decorates: 1.5 s and 80 MB for programs that compile nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_DYNAMO = "torch._dynamo"


def outside_graphs(function: Callable[_P, _R], reason: str) -> Callable[_P, _R]:
    """The function, which breaks the graph where it is called in a compiled one; `fullgraph=True` names the `reason`.

    Nothing compiles before `torch._dynamo` is imported, which `torch.compile` does: until then it is called as it is.
    """
    skipped = _skipped(function, reason)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Dynamo takes the first for true when it traces this, and does not read the second.
        if torch.compiler.is_compiling() or _DYNAMO in sys.modules:
            return skipped(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _skipped(function: Callable[_P, _R], reason: str) -> Callable[_P, _R]:
    """The function as Dynamo skips it.

    torch has a decorator of its own that imports `torch._dynamo` at the first call. It is private and takes no reason,
    so the reason goes where Dynamo looks for one. A torch without it gets the public decorator, which imports at once.
    """
    lazily: Any = getattr(torch, "_disable_dynamo", None)
    if lazily is None:
        return torch.compiler.disable(function, reason=reason)
    skipped: Any = lazily(function)
    skipped._torchdynamo_disable, skipped._torchdynamo_disable_msg = True, reason
    return skipped
