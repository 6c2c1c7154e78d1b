"""A rank that has run out of batches makes collectives in torch's Join context that meet those of a loss."""

from __future__ import annotations

import gc
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch.distributed.algorithms.join import Join

# Of the contexts that exist when a loss is first used, torch does not know which are open: all count until they end.
_open: WeakSet[Join] = WeakSet(x for x in gc.get_referrers(Join) if type(x) is Join and x._enable)


def _keep_record_of_open_contexts() -> None:
    """Let Join note its `with` blocks: torch keeps no record of them, and its modules stay marked after their end."""
    enter, leave = Join.__enter__, Join.__exit__

    @wraps(enter)
    def noted_enter(join: Join) -> Any:
        if join._enable:
            _open.add(join)
        return enter(join)

    @wraps(leave)
    def noted_leave(join: Join, *error: Any) -> Any:
        _open.discard(join)
        return leave(join, *error)

    Join.__enter__, Join.__exit__ = noted_enter, noted_leave  # type: ignore[method-assign]


_keep_record_of_open_contexts()


def refuse_join_context() -> None:
    """Raise ValueError inside of an open Join context, before any collective: ranks may be left that call no loss."""
    if _open:
        raise ValueError(
            "torch.distributed.algorithms.Join must be left out around losses, with whose collectives its own meet "
            "when a rank has run out of batches: pass (0, d) rows when a rank has run out"
        )
