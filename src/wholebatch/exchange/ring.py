"""Exchange "ring": blocks of Y travel from rank to rank. Memory O(b d), whatever the number of ranks.

Block k has the rows of rank k. In step s, rank r computes with block r - s. At the same time it sends this block to
rank r + 1 and receives the next one from rank r - 1. The sums for the columns of a block (statistics, or a gradient)
make the same journey, one step later. Each rank adds its part and sends them on; the last rank sends them to the owner.

    step s on rank r    compute   with block r - s; at the same time
                        send      block r - s, and the sums for block r - s + 1 including this rank's part, to r + 1
                        receive   block r - s - 1, and the sums of ranks r - s ... r - 1 for block r - s, from r - 1

All messages of a step are one `swap` of the transport; `comm.torch_distributed` sends them. On GPUs they run on a
separate stream, while tiles are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor

from ..comm.transport import Message
from ..sweep import Block
from .exchange import ColumnData, Exchange, Initial, Op, VisitBlock, combine_

_COLUMNS, _CARRIED, _SUMS, _TO_OWNER = range(4)  # tags: the content of a message


class RingExchange(Exchange):
    """Send each block of Y, with the numbers and the sums of its columns, to the next rank."""

    _name = "ring exchange with the ranks before and after"

    @cached_property
    def kept_local(self) -> slice:
        return slice(0, self.columns.counts[self.comm.rank])

    def fetch(self, y_local: Tensor) -> Tensor:
        return y_local

    def distribute(self, numbers: Tensor) -> Tensor:
        return numbers

    def accumulate(
        self,
        fetched: Tensor,
        visit: VisitBlock,
        *,
        carried: Tensor | None = None,
        initial: Initial | None = None,
        op: Op = "sum",
        to_owner: bool = False,
    ) -> Tensor | None:
        rank, size, steps = self.comm.rank, self.comm.size, len(self.visits)
        following, previous = (rank + 1) % size, (rank - 1) % size
        counts, offsets = self.columns.counts, self.columns.offsets
        two, single = (2, 1) if steps > 1 else (1, 0)
        y_rows = self.y_rows.counts
        sum_counts = y_rows if to_owner else counts
        blocks = [fetched.contiguous()] if carried is None else [fetched.contiguous(), carried.T.contiguous()]
        block_buffers = [_Buffers(x, rows, 2 * single) for x, rows in zip(blocks, (y_rows, counts), strict=False)]
        first = None if initial is None else initial(1)
        sum_blocks, received_block = (None if first is None else _Buffers(first, sum_counts, n) for n in (two, single))
        local = None
        if first is not None and self.symmetric:
            local = _Buffers(first, counts, 1).take(0, rank, first)
        sums: Tensor | None = None
        for step, planned in enumerate(self.visits):
            source, last = planned.source, step + 1 == steps
            sends, receives = [], []
            if not last:
                for tag, block, buffers in zip((_COLUMNS, _CARRIED), blocks, block_buffers, strict=False):
                    sends.append(Message(block, following, tag))
                    receives.append(Message(buffers.take(step, (source - 1) % size), previous, tag))
            if sum_blocks is not None and received_block is not None:
                if sums is not None:
                    sends.append(Message(sums, following, _SUMS))
                    receives.append(Message(received_block.take(0, source), previous, _SUMS))
                sums = sum_blocks.take(step, source, first)
            finish = self._swap(sends, receives)
            cols = slice(offsets[source] + planned.cols.start, offsets[source] + planned.cols.stop)
            part = planned.cols if self.ragged is None else slice(None)  # of several vectors, blocks are whole
            visit(
                Block(blocks[0][part], cols, planned.rows, planned.triangle),
                ColumnData(
                    None if carried is None else blocks[1][planned.cols].T,
                    None if sums is None else sums[part],
                    local,
                ),
            )
            arrived = finish()
            if sums is not None and step:
                combine_(sums, arrived.pop(), op)
            if not last:
                blocks = arrived
        if first is not None and sums is not None and steps > 1:
            del block, buffers, block_buffers, received_block
            # The last visitor of the local block sends its sums, into memory of that size.
            out = _Buffers(first, (sum_counts[rank],), 1).take(0, 0)
            visitor = (rank + steps - 1) % size
            (sums,) = self._swap([Message(sums, source, _TO_OWNER)], [Message(out, visitor, _TO_OWNER)])()
        if local is not None and sums is not None:
            combine_(sums, local, op)
        return sums

    def reduce(self, accumulated: Tensor, op: Op) -> Tensor:
        return accumulated

    def _swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        finish = self._named(lambda: self.comm.transport.swap(sends, receives))
        return lambda: self._named(finish)


class _Buffers:
    """Memory for blocks of any rank's rows, allocated once and used in turns."""

    def __init__(self, like: Tensor, counts: tuple[int, ...], number: int) -> None:
        self._counts = counts
        self._buffers = [like.new_empty(max(counts), *like.shape[1:]) for _ in range(number)]

    def take(self, turn: int, owner: int, initial: Tensor | None = None) -> Tensor:
        """Return the buffer whose turn it is, with the rows of `owner`, each filled with `initial` if given."""
        buffer = self._buffers[turn % len(self._buffers)][: self._counts[owner]]
        return buffer if initial is None else buffer.copy_(initial.expand_as(buffer))
