"""Exchange "gather": every rank sees all of Y. Memory O(B d); one collective out, one home, or one for each rank.

Large batches come in chunks, some ranks' rows at a time. Tiles of a chunk are computed while later ones are still on
their way, and its gradient goes home while the next is being computed. On GPUs transfers run on a stream of their own.

    Y        | chunk 0 | chunk 1 | chunk 2 |
    tiles              | chunk 0   | chunk 1   | chunk 2   |
    dY                             | chunk 0 | | chunk 1 | | chunk 2 |
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..comm import Communicator
from ..comm.transport import Finish, named
from ..partition import Partition
from ..sweep import Block
from .exchange import Exchange, Op, VisitBlock
from .schedule import Visit, chunks

_Leaving = tuple[bool, Finish]  # whether it is for this rank, and what to wait for


class GatherExchange(Exchange):
    """Y out by an all-gather, its gradient home by the adjoint, a reduce-scatter; sums by an all-reduce.

    Args:
        comm, rows, columns, symmetric: as for every :class:`Exchange`.
        chunk: columns that are worth a transfer of their own; a symmetric S comes rank by rank, and goes home at once.
    """

    def __init__(
        self, comm: Communicator, rows: int, columns: Partition, *, symmetric: bool = False, chunk: int = 1
    ) -> None:
        super().__init__(comm, rows, columns, symmetric=symmetric)
        self._chunks = chunks(columns, chunk)
        self._arriving: list[Finish] = []  # of each rank's rows, until the first pass is through

    @property
    def largest_block(self) -> tuple[int, int]:
        rows, cols = super().largest_block
        return rows, cols if self.symmetric else max(at.stop - at.start for at in map(self._columns, self._chunks))

    @property
    def kept_local(self) -> slice:
        return self.columns.rows(self.comm.rank)

    def fetch(self, y_local: Tensor) -> Tensor:
        if self.comm.size == 1:
            return y_local
        if len(self._chunks) == 1:
            return self.comm.all_gather(y_local, counts=self.columns.counts, check=False)
        transport, y = self.comm.transport, y_local.contiguous()
        out, self._arriving = named(
            transport, "gather exchange", "before", lambda: transport.all_gather_by_rank(y, self.columns.counts)
        )
        return out

    def distribute(self, numbers: Tensor) -> Tensor:
        if self.comm.size == 1:
            return numbers
        return self.comm.all_gather(numbers.T.contiguous(), counts=self.columns.counts, check=False).T

    def accumulate(
        self,
        held: Tensor,
        visit: VisitBlock,
        *,
        carried: Tensor | None = None,
        initial: Tensor | None = None,
        op: Op = "sum",
        to_owner: bool = False,
    ) -> Tensor | None:
        into = None if initial is None else initial.repeat(len(held), *[1] * (initial.dim() - 1))
        local = into[self.kept_local] if into is not None and self.symmetric else None
        early = to_owner and into is not None and len(self._chunks) > 1 and not self.symmetric
        leaving: list[_Leaving] = []
        mine: Tensor | None = None
        for ranks, block in self._blocks(held):
            visit(
                block,
                None if carried is None else carried[:, block.cols],
                None if into is None else into[block.cols],
                local,
            )
            if early and into is not None:
                mine = _finished(leaving, mine)  # before the next: there is memory for one chunk's
                leaving = [self._home(into, rank) for rank in ranks]
        if early:
            return _finished(leaving, mine)
        if not to_owner or into is None or self.comm.size == 1:
            return into
        del held, block  # Y goes before there is memory for what comes home
        return self.comm.reduce_scatter(into, counts=self.columns.counts, check=False)

    def reduce(self, collected: Tensor, op: Op) -> Tensor:
        if isinstance(op, str):
            return self.comm.all_reduce(collected, op, check=False)
        merged = self.comm.all_reduce(collected, check=False)
        largest = [column for column, of_column in enumerate(op) if of_column == "max"]
        if largest:
            merged[:, largest] = self.comm.all_reduce(collected[:, largest], "max", check=False)
        return merged

    def _home(self, into: Tensor, rank: int) -> _Leaving:
        """Put sums of this rank's columns under way to it."""
        transport, x = self.comm.transport, into[self.columns.rows(rank)]
        finish = named(transport, "gather exchange", "before", lambda: transport.reduce(x, rank))
        return rank == self.comm.rank, lambda: named(transport, "gather exchange", "before", finish)

    def _columns(self, ranks: range) -> slice:
        return slice(self.columns.rows(ranks.start).start, self.columns.rows(ranks.stop - 1).stop)

    def _among_all(self, visit: Visit) -> slice:
        first = self.columns.offsets[visit.source]
        return slice(first + visit.cols.start, first + visit.cols.stop)

    def _blocks(self, y_full: Tensor) -> Iterator[tuple[range, Block]]:
        """Columns of some ranks at a time, which are there by then; of a symmetric matrix, rank by rank."""
        planned = [(ranks, self._columns(ranks), self.visits[0].rows, False) for ranks in self._chunks]
        if self.symmetric:
            planned = [
                (range(visit.source, visit.source + 1), self._among_all(visit), visit.rows, visit.triangle)
                for visit in self.visits
            ]
        for ranks, cols, rows, triangle in planned:
            self._await(ranks)
            yield ranks, Block(y_full[cols], cols, rows, triangle)
        self._await(range(self.comm.size))
        self._arriving = []

    def _await(self, ranks: range) -> None:
        for finish in self._arriving[ranks.start : ranks.stop]:
            named(self.comm.transport, "gather exchange", "before", finish)


def _finished(leaving: list[_Leaving], mine: Tensor | None) -> Tensor | None:
    """Own sums, when these are through; as they were before, if none of these is for this rank."""
    for local, finish in leaving:
        found = finish()
        mine = found if local else mine
    return mine
