"""The interface of an exchange: it fetches the rows of Y from their ranks, and combines sums for them over the ranks.

S = X Y^T, so a row of Y is a column of S. Rank r holds n_r rows of Y. A pass visits, block by block, all columns that
this rank computes. Each visit gets

    block          rows of Y
    carried        finished statistics of these columns, read only: sums and shifts of an earlier pass
    accumulated    new statistics of these columns: sums, maxima, gradients. The visit updates them in place

A column of S may also stand for several rows of Y, such as a document's vectors. Then a block holds the rows of its
columns, and only gradients have a row for each row of Y.

Then the exchange combines `accumulated` over the ranks. Between two passes a rank keeps the statistics of all columns
("gather") or of its local columns ("ring").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from ..comm import Communicator
from ..comm.inside import all_gather
from ..comm.transport import named
from ..partition import Partition, Ragged
from ..sweep import Block
from .schedule import Visit, full, half

if TYPE_CHECKING:
    from typing_extensions import Self


class Combination(Protocol):
    """A way to combine the numbers of columns that depend on each other, such as a maximum and a sum relative to it."""

    def combine_(self, x: Tensor, other: Tensor) -> None:
        """Combine the parts of two ranks, (n, k), in place."""
        ...

    def over_ranks(self, comm: Communicator, x: Tensor) -> Tensor:
        """Return the parts of all ranks combined, on every rank. Collective."""
        ...


_T = TypeVar("_T")
Op = str | tuple[str, ...] | Combination
Initial = Callable[[int], Tensor]  # from a number of columns to their statistics before any block, (columns, ...)


def zeros(x: Tensor, width: int, dtype: torch.dtype) -> Initial:
    """Return what makes the statistics of columns before any block if they are sums, so many for each column."""
    return lambda columns: x.new_zeros(columns, width, dtype=dtype)


@dataclass(frozen=True)
class ColumnData:
    """The numbers about the columns of one block during a pass; None where the pass has no such numbers."""

    carried: Tensor | None  # (k, n), finished statistics of the columns
    accumulated: Tensor | None  # (n, ...), to which the visit adds its part, or which it raises to a maximum
    local: Tensor | None  # (n_r, ...), the same as `accumulated` for the local columns of a symmetric S


VisitBlock = Callable[[Block, ColumnData], None]  # a pass calls it for each block


class Exchange(ABC):
    """Move the rows of Y and their statistics between ranks. Collective: every rank makes the same passes in order.

    Args:
        comm: the ranks.
        rows: number of X's rows on this rank.
        columns: the owners of Y's rows.
        symmetric: whether Y is X, so that half of S suffices.
        chunk: least number of columns of one transfer, for an exchange that transfers the columns in several parts. If
            S is symmetric, the rows of one rank are one transfer, and the gradient is reduced in one piece.
        ragged: the rows of Y that each column stands for; None: one.
    """

    _name: ClassVar[str]  # in errors

    def __init__(
        self,
        comm: Communicator,
        rows: int,
        columns: Partition,
        *,
        symmetric: bool = False,
        chunk: int = 1,
        ragged: Ragged | None = None,
    ) -> None:
        self.comm, self.columns, self.symmetric, self.chunk, self.ragged = comm, columns, symmetric, chunk, ragged
        self.y_rows = columns if ragged is None else ragged.vectors
        self.visits: tuple[Visit, ...] = half(columns, comm.rank) if symmetric else full(rows, columns, comm.rank)

    def over(self, comm: Communicator) -> Self:
        """Return an exchange of the same rows and columns, for another call of these ranks."""
        copied = object.__new__(self.__class__)
        copied.__dict__.update(self.__dict__, comm=comm)
        return copied

    def _named(self, act: Callable[[], _T]) -> _T:
        """Return act(); a failure of the transport names this exchange."""
        return named(self.comm.transport, self._name, "before", act)

    @cached_property
    def largest_block(self) -> tuple[int, int]:
        """The largest number of rows, and of columns, of a block."""
        rows, cols = (
            max(cut.stop - cut.start for cut in cuts)
            for cuts in ([visit.rows for visit in self.visits], [visit.cols for visit in self.visits])
        )
        return rows, cols

    @property
    def one_transfer(self) -> bool:
        """Whether all rows of Y arrive at once, so that a small batch may be computed at once."""
        return False

    def rows_of(self, columns: slice) -> slice:
        """Return the rows of Y, among those of all ranks, that some columns stand for."""
        return columns if self.ragged is None else self.ragged.of(columns)

    @property
    @abstractmethod
    def kept_local(self) -> slice:
        """The slice of the local columns among the columns whose statistics this rank keeps."""

    @abstractmethod
    def fetch(self, y_local: Tensor) -> Tensor:
        """Return the rows of Y that passes read, for forward and backward: (rows of Y, d) -> (rows kept, d).

        The transfer may go on during the first pass, so only passes read the tensor.
        """

    @abstractmethod
    def distribute(self, numbers: Tensor) -> Tensor:
        """Return k numbers of each kept column, from those of the local columns: (k, n_r) -> (k, columns kept)."""

    def for_all_columns(self, numbers: Tensor) -> Tensor:
        """Return numbers of all columns, on every rank, from those of the local columns: (n_r, k) -> (n, k)."""
        return all_gather(self.comm, numbers, self.columns.counts)

    @abstractmethod
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
        """Make one pass over S, and return the accumulated statistics of columns.

        Args:
            fetched: from `fetch`.
            visit: called for each block.
            carried: (k, columns kept), numbers that travel with the columns.
            initial: makes the statistics of columns before any block; None: nothing is accumulated.
            op: "sum" or "max" combines the parts of two ranks; a tuple has one of them for each of k numbers; or a
                :class:`Combination`.
            to_owner: whether the statistics are sums for rows of Y, its gradient, which are reduced to the owners of
                these rows as soon as they are complete.

        Returns:
            (columns kept, ...), for `reduce`, which combines the parts of all ranks if the pass has not; with to_owner
            (rows of Y, ...), already combined; None without `initial`.
        """

    @abstractmethod
    def reduce(self, accumulated: Tensor, op: Op) -> Tensor:
        """Return the accumulated statistics combined over the ranks, for each column that this rank keeps."""


def combine_(x: Tensor, other: Tensor, op: Op) -> None:
    """Replace x by the sum or the maximum of x and other, in place; a tuple has one operation for each column."""
    if isinstance(op, tuple):
        for column, column_op in enumerate(op):
            combine_(x[:, column], other[:, column], column_op)
    elif not isinstance(op, str):
        op.combine_(x, other)
    elif op == "sum":
        x.add_(other)
    else:
        x.copy_(torch.maximum(x, other))
