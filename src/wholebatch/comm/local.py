"""The communicator of one process, for which every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .communicator import Communicator
from .maps import Loss
from .transport import Finish, Transport, done

_KEPT: dict[str, Any] = {}  # of this process alone


class LocalTransport(Transport):
    """One rank, whose messages to itself wait in a queue."""

    rank, size, max_tag = 0, 1, 2**31 - 1

    def __init__(self) -> None:
        super().__init__()
        self.kept = _KEPT

    def split(self, members: Sequence[int], *, member: bool, name: str) -> LocalTransport | None:
        return LocalTransport() if member else None

    def _copy(self, x: Tensor, *_: Any, **__: Any) -> Finish:
        self.check_not_closed()
        return done(x.clone())

    all_gather = reduce_scatter = all_reduce = broadcast = reduce = all_to_all = _copy

    def _unreachable(self, *_: Any, **__: Any) -> Finish:
        raise AssertionError("there is no other rank; please report this")

    _send = _recv = _unreachable


class LocalCommunicator(Communicator):
    """One rank without a process group; `group=None` means this one where torch.distributed is not initialized.

    The arguments are those of every :class:`Communicator`.
    """

    def __init__(self, *, loss: Loss = "sum", check: bool | None = None, trace: bool | None = None) -> None:
        super().__init__(LocalTransport(), loss=loss, check=check, trace=trace)
