"""The interface of an exchange: it fetches Y's rows for a pass over S, and accumulates sums about them over the ranks.

Y's rows, (n_r, d) on rank r, are the columns of S. A pass over S visits, block by block, all columns that this rank
computes. With a block come finished statistics of its columns ("carried": sums and shifts), and memory to which the
visit adds its part of new statistics ("accumulated": sums, maxima, gradients), which are combined over the ranks.

Between the passes, "gather" keeps the statistics of all columns on every rank, and "ring" those of the local columns.
`kept_local` is the place of the local columns among those that are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Communicator
from ..partition import Partition
from ..sweep import Block
from .schedule import Visit, full, half

Op = str | tuple[str, ...]


@dataclass(frozen=True)
class ColumnData:
    """The numbers about the columns of one block during a pass; None where the pass has no such numbers.

    Args:
        carried: (k, n), finished statistics of the columns.
        accumulated: (n, ...), to which the visit adds its part, or which it raises to a maximum.
        local: (n_r, ...), the same as `accumulated` for the local columns of a symmetric S.
    """

    carried: Tensor | None
    accumulated: Tensor | None
    local: Tensor | None


VisitBlock = Callable[[Block, ColumnData], None]  # a pass calls it for each block


class Exchange(ABC):
    """Move Y's rows and statistics about them between ranks. Collective: every rank makes the same passes in order.

    Args:
        comm: the ranks.
        rows: number of X's rows on this rank.
        columns: the owners of Y's rows.
        symmetric: whether S is X's rows against themselves, so that half of it suffices.
        chunk: least number of columns of one transfer, where the exchange sends parts of a rank's rows.
    """

    def __init__(
        self, comm: Communicator, rows: int, columns: Partition, *, symmetric: bool = False, chunk: int = 1
    ) -> None:
        self.comm, self.columns, self.symmetric, self.chunk = comm, columns, symmetric, chunk
        self.visits: tuple[Visit, ...] = half(columns, comm.rank) if symmetric else full(rows, columns, comm.rank)

    @property
    def largest_block(self) -> tuple[int, int]:
        """The largest number of rows, and of columns, of a block."""
        rows, cols = (
            max(at.stop - at.start for at in ats)
            for ats in ([visit.rows for visit in self.visits], [visit.cols for visit in self.visits])
        )
        return rows, cols

    @property
    @abstractmethod
    def kept_local(self) -> slice:
        """The place of the local columns among those whose statistics this rank keeps."""

    @abstractmethod
    def fetch(self, y_local: Tensor) -> Tensor:
        """Return the rows of Y from which passes start, kept for backward: (n_r, d) -> (columns kept, d).

        They are complete when the first pass has ended.
        """

    @abstractmethod
    def distribute(self, numbers: Tensor) -> Tensor:
        """Return numbers of the kept columns, to be carried with them, from the local ones: (k, n_r) -> (k, kept)."""

    @abstractmethod
    def accumulate(
        self,
        fetched: Tensor,
        visit: VisitBlock,
        *,
        carried: Tensor | None = None,
        initial: Tensor | None = None,
        op: Op = "sum",
        to_owner: bool = False,
    ) -> Tensor | None:
        """Make one pass over S, and return the accumulated statistics of columns.

        Args:
            fetched: from `fetch`.
            visit: called for each block.
            carried: (k, columns kept), travels with the columns.
            initial: (1, ...), the first value of each column's statistics; None: nothing is accumulated.
            op: "sum" or "max", which combines the parts of two ranks; or one of them for each of k numbers.
            to_owner: whether to reduce sums to the owners of the columns, as soon as they are complete.

        Returns:
            (columns kept, ...), to be finished by `reduce`; with to_owner (n_r, ...); None without `initial`.
        """

    @abstractmethod
    def reduce(self, accumulated: Tensor, op: Op) -> Tensor:
        """Return the accumulated statistics combined over the ranks, for each column that this rank keeps."""


def combine_(x: Tensor, other: Tensor, op: Op) -> None:
    """Add `other` to x ("sum") or raise x to it ("max"), in place; a tuple has one operation for each column."""
    if isinstance(op, tuple):
        for column, column_op in enumerate(op):
            combine_(x[:, column], other[:, column], column_op)
    elif op == "sum":
        x.add_(other)
    else:
        x.copy_(torch.maximum(x, other))
