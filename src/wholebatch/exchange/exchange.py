"""What every exchange does: bring Y to the rows that need it, and take home what they say about it.

Y's rows, (n_r, d) on rank r, are the columns of S. A pass over S visits all columns that are this rank's to compute,
block by block. Along with a block come the columns' finished numbers ("carried": sums and shifts), and there is room
for what the visit says about each column ("into": sums, maxima, gradients), combined over the ranks afterward.

Statistics of columns stay where the exchange keeps them between the passes: "gather" holds all columns' on every rank,
"ring" its own rows'. `kept_own` says where a rank's own columns are among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..comm import Communicator
from ..partition import Partition
from ..sweep import Block
from .schedule import Visit, full, half

# What a pass does with a block: visit(block, carried, into, own). `carried` is (k, n), of the block's columns. `into`
# is (n, ...), to be added to or maximized. `own` is the same for the columns that this rank's own rows are, where S is
# symmetric, else None.
VisitBlock = Callable[[Block, Tensor | None, Tensor | None, Tensor | None], None]
Op = str | tuple[str, ...]


class Exchange(ABC):
    """Collective: every rank makes the same passes in the same order.

    Args:
        comm: the ranks.
        rows: of X on this rank.
        columns: who owns which of Y's rows.
        symmetric: S is X's rows against themselves, and half of it suffices.
    """

    def __init__(self, comm: Communicator, rows: int, columns: Partition, *, symmetric: bool = False) -> None:
        self.comm, self.columns, self.symmetric = comm, columns, symmetric
        self.visits: tuple[Visit, ...] = half(columns, comm.rank) if symmetric else full(rows, columns, comm.rank)

    @property
    def largest_block(self) -> tuple[int, int]:
        """The most rows, and the most columns, of a block."""
        rows, cols = (
            max(at.stop - at.start for at in ats)
            for ats in ([visit.rows for visit in self.visits], [visit.cols for visit in self.visits])
        )
        return rows, cols

    @property
    @abstractmethod
    def kept_local(self) -> slice:
        """Where this rank's own columns are among those whose statistics it keeps."""

    @abstractmethod
    def fetch(self, y_local: Tensor) -> Tensor:
        """What the passes start from, to be kept for backward: (n_r, d) -> (columns kept, d).

        It is complete when the first pass is through.
        """

    @abstractmethod
    def distribute(self, numbers: Tensor) -> Tensor:
        """Numbers of this rank's own columns, to be carried with them: (k, n_r) -> (k, columns kept)."""

    @abstractmethod
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
        """One pass over S.

        Args:
            held: from `bring`.
            visit: is called for each block.
            carried: (k, columns kept), travels with the columns.
            initial: (1, ...), with which each column's `into` begins; None: there is nothing to collect.
            op: "sum" or "max", how what two ranks say about a column combines; or one of them for each of k numbers.
            to_owner: whether to reduce sums to the owners of the columns, as soon as they are complete.

        Returns:
            (columns kept, ...), to be finished by `merge`; with to_owner (n_r, ...); None without `initial`.
        """

    @abstractmethod
    def reduce(self, collected: Tensor, op: Op) -> Tensor:
        """Combine what the ranks have collected: then each kept column's numbers are those of all ranks."""


def combine_(x: Tensor, other: Tensor, op: Op) -> None:
    """Add `other` to x, or raise x to it, in place; or the one or the other for each of k columns."""
    if isinstance(op, tuple):
        for column, of_column in enumerate(op):
            combine_(x[:, column], other[:, column], of_column)
    elif op == "sum":
        x.add_(other)
    else:
        x.copy_(torch.maximum(x, other))
