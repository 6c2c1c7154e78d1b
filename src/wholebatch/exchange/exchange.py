"""What every exchange does: bring Y to the rows that need it, and take home what they say about it.

Y's rows, (n_r, d) on rank r, are the columns of S. A pass over S visits all columns that are this rank's to compute,
block by block. Along with a block come the columns' finished numbers ("carried": sums and shifts), and there is room
for what the visit says about each column ("into": sums, maxima, gradients), combined over the ranks afterwards.

Statistics of columns stay where the exchange keeps them between the passes: "gather" holds all columns' on every rank,
"ring" its own rows'. `kept_own` says where a rank's own columns are among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from ..comm import Communicator
from ..partition import Partition
from ..sweep import Block
from .schedule import Visit, full, half

# What a pass does with a block: visit(block, carried, into, own). `carried` is (k, n), of the block's columns. `into`
# is (n, ...), to be added to or maximised. `own` is the same for the columns that this rank's own rows are, where S is
# symmetric, else None.
VisitBlock = Callable[[Block, Tensor | None, Tensor | None, Tensor | None], None]


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
    def kept_own(self) -> slice:
        """Where this rank's own columns are among those whose statistics it keeps."""

    @abstractmethod
    def bring(self, y_local: Tensor) -> Tensor:
        """What the passes start from, to be kept for backward: (n_r, d) -> (columns kept, d)."""

    @abstractmethod
    def collect(
        self,
        held: Tensor,
        visit: VisitBlock,
        *,
        carried: Tensor | None = None,
        initial: Tensor | None = None,
        op: str = "sum",
    ) -> Tensor | None:
        """One pass over S.

        Args:
            held: from `bring`.
            visit: is called for each block.
            carried: (k, columns kept), travels with the columns.
            initial: (1, ...), with which each column's `into` begins; None: there is nothing to collect.
            op: "sum" or "max", how what two ranks say about a column combines.

        Returns:
            (columns kept, ...), to be finished by `merge`, `finish` or `home`; None without `initial`.
        """

    @abstractmethod
    def merge(self, collected: Tensor, op: str) -> Tensor:
        """Combine what the ranks have collected: then each kept column's number is that of all ranks."""

    @abstractmethod
    def finish(
        self, sums: Tensor | None, row_numbers: Tensor, column_numbers: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor | None, Tensor]:
        """`merge` the sums, and total what rows and columns say. One all-reduce.

        Args:
            sums: collected, (columns kept,).
            row_numbers: (k,), of this rank's rows.
            column_numbers: from merged sums of some columns to their (k,) numbers, which add up over columns.

        Returns:
            The merged sums; and the (k,) numbers, added up over all rows and all columns, the same on all ranks.
        """

    @abstractmethod
    def home(self, collected: Tensor) -> Tensor:
        """Bring sums to the columns' owners: (columns kept, ...) -> (n_r, ...)."""
