"""Which module makes a call. Ranks that call two modules of one kind in another order would mix their batches.

Each process numbers its modules as it builds them. A rank may build some for itself, so a module's numbers may differ.
But where ranks build and call in one order, as (1, 1), (2, 3), no number falls where another rises: (1, 3), (2, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from itertools import count
from operator import ge, le
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
built = count(1)  # the numbers of this process's modules, which their copies keep
calling: ContextVar[int] = ContextVar("number of the module whose method runs", default=0)  # 0: a function


def numbered(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a collective method of a module: inside, `calling` has the module's number."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        token = calling.set(getattr(args[0], "_number", 0))
        try:
            return method(*args, **kwargs)
        finally:
            calling.reset(token)

    return call


def other_order(kept: dict[str, Any], caller: str, modules: Sequence[int]) -> ValueError | None:
    """Return the error of a call whose modules on the ranks cross those of an earlier call of this kind in a group."""
    earlier, now = kept.setdefault(f"modules of {caller.partition(' #')[0]}", {}), tuple(modules)
    if 0 in now or now in earlier:
        return None
    for other in earlier:
        if not (all(map(le, other, now)) or all(map(ge, other, now))):
            return ValueError(
                f"{caller}: all ranks must build and call their modules in the same order, got numbers {list(other)} "
                f"and {list(now)} of two modules on ranks 0, 1, ..., in the order in which each rank has built its "
                "modules: keep them in a list or a dict, not in a set, whose order differs between processes"
            )
    earlier[now] = True
    if len(earlier) > 64:  # a program may build a module in each step
        del earlier[next(iter(earlier))]
    return None
