"""Exchange "gather": every rank sees all of Y at once. Memory O(B d); one collective out, one home."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..sweep import Block
from .exchange import Exchange, Op, VisitBlock


class GatherExchange(Exchange):
    """Y out by one all-gather, its gradient home by the adjoint, one reduce-scatter; sums by an all-reduce."""

    @property
    def largest_block(self) -> tuple[int, int]:
        rows, cols = super().largest_block
        return rows, cols if self.symmetric else self.columns.total

    @property
    def kept_own(self) -> slice:
        return self.columns.rows(self.comm.rank)

    def bring(self, y_local: Tensor) -> Tensor:
        if self.comm.size == 1:
            return y_local
        return self.comm.all_gather(y_local, counts=self.columns.counts, check=False)

    def collect(
        self,
        held: Tensor,
        visit: VisitBlock,
        *,
        carried: Tensor | None = None,
        initial: Tensor | None = None,
        op: Op = "sum",
    ) -> Tensor | None:
        into = None if initial is None else initial.repeat(len(held), *[1] * (initial.dim() - 1))
        own = into[self.kept_own] if into is not None and self.symmetric else None
        for block in self._blocks(held):
            visit(
                block,
                None if carried is None else carried[:, block.cols],
                None if into is None else into[block.cols],
                own,
            )
        return into

    def merge(self, collected: Tensor, op: Op) -> Tensor:
        if isinstance(op, str):
            return self.comm.all_reduce(collected, op, check=False)
        merged = self.comm.all_reduce(collected, check=False)
        largest = [column for column, of_column in enumerate(op) if of_column == "max"]
        if largest:
            merged[:, largest] = self.comm.all_reduce(collected[:, largest], "max", check=False)
        return merged

    def home(self, collected: Tensor) -> Tensor:
        if self.comm.size == 1:
            return collected
        return self.comm.reduce_scatter(collected, counts=self.columns.counts, check=False)

    def _blocks(self, y_full: Tensor) -> Iterator[Block]:
        """All columns at once, so that no tile ends where a rank's rows do; of a symmetric matrix, rank by rank."""
        if not self.symmetric:
            yield Block(y_full, slice(0, len(y_full)), self.visits[0].rows)
            return
        for visit in self.visits:
            first = self.columns.offsets[visit.source]
            cols = slice(first + visit.cols.start, first + visit.cols.stop)
            yield Block(y_full[cols], cols, visit.rows, visit.triangle)
