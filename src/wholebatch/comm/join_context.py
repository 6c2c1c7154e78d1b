"""A rank that has run out of batches makes collectives in torch's Join context that meet those of a loss."""

from __future__ import annotations

import gc
from weakref import ref

from torch.distributed.algorithms.join import Join, Joinable

from .transport import Transport

_JOINABLES = "modules that a Join context may hold"


def refuse_join_context(transport: Transport) -> None:
    """Raise ValueError inside of a Join context of a module that existed in the first call in this group."""
    if transport.size > 1 and _JOINABLES not in transport.kept:
        transport.kept[_JOINABLES] = [ref(x) for x in gc.get_objects() if Joinable in type(x).__mro__]
    for of in [*transport.kept.get(_JOINABLES, ())]:
        if (joinable := of()) is not None and joinable._join_config.enable:
            if any(type(x) is Join for x in gc.get_objects()):
                raise ValueError(
                    "torch.distributed.algorithms.Join must be left out around losses, with whose collectives its own "
                    "meet when a rank has run out of batches: pass (0, d) rows when a rank has run out"
                )
            transport.kept[_JOINABLES].remove(of)  # that context has ended, and left this as it was
