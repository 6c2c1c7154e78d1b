"""Ranks that all pass what this process passes: a step of one rank among many runs in one process, and is counted.

Each result is the one of W ranks that pass the same tensor, in as much memory as `comm.torch_distributed` takes on a
CPU. So a loss has no meaningful value, but the right shapes. The bytes that a rank sends are those of the usual
algorithms: a ring for sums and for parts of all ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import Communicator
from ..comm.transport import Finish, Message, Transport, done

# The part of a tensor's bytes that a rank sends to others, on W ranks.
SENT: dict[str, Callable[[int], float]] = {
    "all_gather": lambda w: w - 1,
    "all_to_all": lambda w: (w - 1) / w,
    "all_reduce": lambda w: 2 * (w - 1) / w,
    "message": lambda w: 1,
}


class EqualTransport(Transport):
    """Rank 0 of W that pass the same tensors."""

    rank, max_tag = 0, 2**31 - 1

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.calls: list[tuple[str, tuple[int, ...]]] = []  # one after the other: the name in `SENT`, and the bytes
        self._under_way: dict[int, deque[Tensor]] = defaultdict(deque)

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a counted step gathers and reduces on all ranks alike; please report this")

    split = broadcast = reduce = _unused

    def all_gather(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        self._sent("all_gather", x)
        return done(_copies(x, counts))

    def reduce_scatter(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        parts = self.all_to_all(x, counts, (counts[0],) * self.size)
        return lambda: parts().unflatten(0, (self.size, counts[0])).sum(0, dtype=x.dtype)

    def all_reduce(self, x: Tensor, op: str) -> Finish:
        self._sent("all_reduce", x)
        if op == "sum":
            return done(x | x if x.dtype == torch.bool else x * self.size)
        return done(x**self.size if op == "prod" else x.clone())

    def all_to_all(self, x: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]) -> Finish:
        self._sent("all_to_all", x)
        return done(_copies(x, receive_counts))

    def swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        self._sent("message", *[message.x for message in sends])
        return super().swap(sends, receives)

    def _send(self, x: Tensor, dest: int, wire_tag: int) -> Finish:
        self._under_way[wire_tag].append(x)
        return done(x)

    def _recv(self, out: Tensor, source: int, wire_tag: int) -> Finish:
        return lambda: out.copy_(self._under_way[wire_tag].popleft())

    def _sent(self, name: str, *tensors: Tensor) -> None:
        self.calls.append((name, tuple(x.numel() * x.element_size() for x in tensors)))


def _copies(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the first rows of x, as many as each count says, one after the other."""
    out = x.new_empty((sum(counts), *x.shape[1:]))
    for part in out.split_with_sizes(list(counts)):
        part.copy_(x[: len(part)])
    return out


class EqualRanks(Communicator):
    """The communicator of W ranks that pass the same tensors."""

    transport: EqualTransport

    def __init__(self, size: int) -> None:
        super().__init__(EqualTransport(size), check=True, trace=False)
