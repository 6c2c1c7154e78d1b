"""Exchange "gather": every rank sees all of Y at once. Memory O(B d); one collective out, one home."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._precision import wide_dtype
from ..sweep import Block
from .exchange import Exchange, VisitBlock


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
        op: str = "sum",
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

    def merge(self, collected: Tensor, op: str) -> Tensor:
        return self.comm.all_reduce(collected, op, check=False)

    def finish(
        self, sums: Tensor | None, row_numbers: Tensor, column_numbers: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor | None, Tensor]:
        if sums is None:
            return None, self.comm.all_reduce(row_numbers, check=False)
        wide = wide_dtype(sums.device)
        merged = self.comm.all_reduce(torch.cat([sums.to(wide), row_numbers]), check=False)
        merged_sums = merged[: len(sums)].to(sums.dtype)
        return merged_sums, merged[len(sums) :] + column_numbers(merged_sums)

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
