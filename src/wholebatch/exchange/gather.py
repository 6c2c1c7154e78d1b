"""Exchange "gather": every rank holds all of Y, in O(B d) memory, by one all-gather and one reduce-scatter.

On up to 8 ranks, a large batch is transferred in chunks, the rows of some ranks at a time. Tiles of a chunk are
computed while later chunks are in transfer; its gradient is reduced to the owners while the next chunk is computed. On
GPUs, transfers run on a separate stream. On more ranks there is one chunk: a transfer for each rank takes too long.

    Y        | chunk 0 | chunk 1 | chunk 2 |
    tiles              | chunk 0   | chunk 1   | chunk 2   |
    dY                             | chunk 0 | | chunk 1 | | chunk 2 |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import Tensor

from ..comm.inside import all_gather, all_reduce, reduce_scatter
from ..comm.transport import Finish
from ..sweep import Block
from .exchange import ColumnData, Exchange, Initial, Op, VisitBlock
from .schedule import Visit, chunks

_Pending = tuple[bool, Finish]  # whether the sums are for this rank, and the function that waits for them


class GatherExchange(Exchange):
    """Fetch Y by an all-gather, reduce its gradient by a reduce-scatter, and statistics by an all-reduce."""

    _name = "gather exchange"
    _arriving: Sequence[Finish] = ()  # one for each rank's rows, until the first pass has ended

    @cached_property
    def _chunks(self) -> tuple[range, ...]:
        return chunks(self.columns, self.chunk)

    @cached_property
    def largest_block(self) -> tuple[int, int]:
        rows, cols = super().largest_block
        return rows, cols if self.symmetric else max(cut.stop - cut.start for cut in map(self._columns, self._chunks))

    @cached_property
    def one_transfer(self) -> bool:
        return len(self._chunks) == 1 and not self.symmetric

    @cached_property
    def kept_local(self) -> slice:
        return self.columns.rows(self.comm.rank)

    def fetch(self, y_local: Tensor) -> Tensor:
        if self.comm.size == 1 or len(self._chunks) == 1:
            return all_gather(self.comm, y_local, self.y_rows.counts)
        transport, y = self.comm.transport, y_local.contiguous()
        out, self._arriving = self._named(lambda: transport.all_gather_by_rank(y, self.y_rows.counts))
        return out

    def distribute(self, numbers: Tensor) -> Tensor:
        if self.comm.size == 1:
            return numbers
        return all_gather(self.comm, numbers.T, self.columns.counts).T

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
        partition, place = (self.y_rows, self.rows_of) if to_owner else (self.columns, _unchanged)
        accumulated = None if initial is None else initial(partition.total)
        local = accumulated[self.kept_local] if accumulated is not None and self.symmetric else None
        early = to_owner and accumulated is not None and len(self._chunks) > 1 and not self.symmetric
        pending: list[_Pending] = []
        local_sums: Tensor | None = None
        for ranks, block in self._blocks(fetched):
            columns = ColumnData(
                None if carried is None else carried[:, block.cols],
                None if accumulated is None else accumulated[place(block.cols)],
                local,
            )
            visit(block, columns)
            if early and accumulated is not None:
                local_sums = _finished(pending, local_sums)  # memory then holds the sums of one chunk only
                pending = [self._start_reduce(accumulated, rank) for rank in ranks]
        if early:
            return _finished(pending, local_sums)
        if not to_owner or accumulated is None or self.comm.size == 1:
            return accumulated
        del fetched, block, columns  # free Y before the reduce-scatter allocates its result
        return reduce_scatter(self.comm, accumulated, partition.counts)

    def reduce(self, accumulated: Tensor, op: Op) -> Tensor:
        if isinstance(op, str):
            return all_reduce(self.comm, accumulated, op)
        if not isinstance(op, tuple):
            return op.over_ranks(self.comm, accumulated)
        reduced = all_reduce(self.comm, accumulated)
        largest = [column for column, column_op in enumerate(op) if column_op == "max"]
        if largest:
            reduced[:, largest] = all_reduce(self.comm, accumulated[:, largest], "max")
        return reduced

    def _start_reduce(self, accumulated: Tensor, rank: int) -> _Pending:
        """Start to reduce the sums of a rank's rows of Y to it."""
        transport, x = self.comm.transport, accumulated[self.y_rows.rows(rank)]
        finish = self._named(lambda: transport.reduce_(x, rank))
        return rank == self.comm.rank, lambda: self._named(finish)

    def _columns(self, ranks: range) -> slice:
        return slice(self.columns.rows(ranks.start).start, self.columns.rows(ranks.stop - 1).stop)

    def _gathered_columns(self, visit: Visit) -> slice:
        first = self.columns.offsets[visit.source]
        return slice(first + visit.cols.start, first + visit.cols.stop)

    def _blocks(self, y_full: Tensor) -> Iterator[tuple[range, Block]]:
        """Yield the columns of some ranks at a time, once they have arrived; if S is symmetric, of one rank."""
        planned = [(ranks, self._columns(ranks), self.visits[0].rows, False) for ranks in self._chunks]
        if self.symmetric:
            planned = [
                (range(visit.source, visit.source + 1), self._gathered_columns(visit), visit.rows, visit.triangle)
                for visit in self.visits
            ]
        for ranks, cols, rows, triangle in planned:
            self._await(ranks)
            yield ranks, Block(y_full[self.rows_of(cols)], cols, rows, triangle)
        self._await(range(self.comm.size))
        self._arriving = ()

    def _await(self, ranks: range) -> None:
        for finish in self._arriving[ranks.start : ranks.stop]:
            self._named(finish)


def _unchanged(columns: slice) -> slice:
    return columns


def _finished(pending: list[_Pending], local_sums: Tensor | None) -> Tensor | None:
    """Wait for the pending reductions; return the sums for this rank, or `local_sums` if none of these is."""
    for is_local, finish in pending:
        reduced = finish()
        local_sums = reduced.clone() if is_local else local_sums  # it may be a part of the sums for all ranks
    return local_sums
