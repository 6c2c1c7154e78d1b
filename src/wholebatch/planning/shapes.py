"""The shapes of a step, and the decisions of the library that follow from them: tiles, exchange, memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from .._base.precision import accumulation_dtype
from ..exchange import ExchangeUsed as ExchangeUsed
from ..exchange import num_entries
from ..exchange.schedule import full, half
from ..exchange.select import automatic
from ..losses.catalog import CATALOG, Declaration
from ..partition import Partition
from ..sweep import Products, default_side
from ..sweep.memory import Budget, Memory, bytes_of_an_entry, fit
from .declared import Counts
from .sizes import PARTIAL_FC, LossName


@dataclass(frozen=True)
class Shapes:
    """The shapes of a step.

    Args:
        loss: its name, one of `LOSSES`, or that of a declared loss.
        batch_size: B, examples on all ranks: pairs, or images of classes.
        embedding_size: d.
        ranks: W.
        dtype: of the features.
        device: "cpu" or "cuda"; it decides the side of a tile.
        classes: C, of PartialFC, on all ranks.
        sample_rate: of PartialFC.
        declared: what is counted of a declared loss; None: the loss is built in.
    """

    loss: LossName
    batch_size: int
    embedding_size: int
    ranks: int = 1
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    classes: int = 0
    sample_rate: float = 1.0
    declared: Counts | None = None

    @property
    def of_classes(self) -> bool:
        """Return whether rows meet the centers of classes, as in PartialFC."""
        return self.loss == PARTIAL_FC

    @property
    def entry(self) -> Declaration | None:
        """Return the loss's entry in the catalog; None for PartialFC and for a declared loss."""
        return None if self.of_classes or self.declared is not None else CATALOG[self.loss]

    @property
    def one_pass(self) -> bool:
        """Return whether S is computed once, with its gradient."""
        return self.entry is not None and self.entry.sweep is not None and self.entry.sweep.one_pass

    @property
    def several_positives(self) -> bool:
        """Return whether a row may have several positives, as labels give it; then exp(S) is kept unrounded."""
        return self.entry is not None and self.entry.kind == "labeled"

    @property
    def sums_size(self) -> int:
        """Return a, the bytes of a number in sums and gradients."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Return s, the bytes of a number that is sent; rows of unit length, or of a declared loss, are like sums."""
        return self.sums_size if self.symmetric or self.declared is not None else self.dtype.itemsize

    @property
    def towers(self) -> int:
        """Return the number of feature matrices."""
        if self.declared is not None:
            return self.declared.towers
        return 1 if self.entry is None else self.entry.inputs

    @property
    def rows(self) -> int:
        """Return b, of the rank with most rows."""
        return ceil(self.batch_size / self.ranks)

    @property
    def centers(self) -> int:
        """Return the number of centers, on the rank with most classes."""
        return ceil(self.classes / self.ranks)

    @property
    def sampled(self) -> int:
        """Return the classes of a step on a rank, an upper bound that is rarely exceeded.

        They are the labels, and each of the other classes with one probability.
        """
        if self.sample_rate == 1:
            return self.centers
        with_label = self.classes * (1 - (1 - 1 / self.classes) ** self.batch_size)
        others = self.classes - with_label
        deviation = (others * self.sample_rate * (1 - self.sample_rate) / self.ranks) ** 0.5
        return min(self.centers, ceil((with_label + self.sample_rate * others) / self.ranks + 3 * deviation))

    @property
    def symmetric(self) -> bool:
        """Return whether S holds features against themselves."""
        if self.declared is not None:
            return self.declared.symmetric
        return self.entry is not None and self.entry.symmetric

    @property
    def partition(self) -> Partition:
        """Return which rank owns which rows of Y; of a symmetric S these are the rows of all views."""
        each = 1 if self.entry is None else self.entry.rows_per_example
        return Partition(tuple(each * n for n in Partition.even(self.batch_size, self.ranks).counts))

    @property
    def items_per_example(self) -> tuple[int, ...]:
        """Return how many inputs of each encoder an example has."""
        return (1,) * self.towers

    @property
    def columns(self) -> Partition:
        """Return which rank owns which columns of S, of which there are sums."""
        return self.partition

    @property
    def staying(self) -> int:
        """Return the rows of X on the rank with most, whose features stay there."""
        return max(self.partition.counts)

    @property
    def vectors(self) -> int:
        """Return the rows of all feature matrices on the rank with most."""
        return self.towers * self.rows

    @property
    def side(self) -> int:
        """Return the side of a tile."""
        return default_side(torch.device(self.device))

    @property
    def products(self) -> Products:
        """Return the precision of products that "auto" chooses, with TF32 forbidden."""
        halves = self.device == "cuda" and self.dtype.itemsize == 2
        return Products(str(self.dtype).removeprefix("torch.")) if halves else Products()

    @property
    def entries(self) -> int:
        """Return the entries of S on the first rank, which has most rows."""
        if self.of_classes:
            return self.sampled * self.batch_size
        columns = self.partition
        visits = half(columns, 0) if self.symmetric else full(columns.counts[0], columns, 0)
        return num_entries(visits, self.side)

    def exchange(self) -> ExchangeUsed:
        """Return the exchange that "auto" selects."""
        if self.of_classes:
            return "gather"
        return automatic(self.partition.total, self.embedding_size * self.sums_size)

    def budget(self, memory: Memory) -> Budget:
        """Return the budget that `memory=` gives; a loss with one pass, or a declared one, keeps nothing."""
        entries = 0 if self.one_pass or self.declared is not None else self.entries
        dtype = accumulation_dtype(self.dtype)
        times = 1 if self.declared is None else ceil(self.declared.of_tile / (2 * dtype.itemsize))
        of_entry = times * bytes_of_an_entry(dtype, self.products)
        exact = self.several_positives
        return fit(memory, entries=entries, side=self.side, dtype=dtype, bytes_of_entry=of_entry, exact=exact)

    def memory_for(self, itemsize: int) -> int:
        """Return the value of `memory=` that keeps all of exp(S), with `itemsize` bytes for each entry."""
        of_tiles = self.side**2 * bytes_of_an_entry(accumulation_dtype(self.dtype), self.products)
        return of_tiles + self.entries * itemsize

    def kept_sizes(self) -> tuple[int, ...]:
        """Return the bytes of a kept entry of exp(S), for each precision in which it can be kept."""
        if self.one_pass or self.declared is not None:
            return ()
        return (self.sums_size,) if self.sums_size == 8 or self.several_positives else (2, self.sums_size)
