"""The shapes of a step, and the decisions of the library that follow from them: tiles, exchange, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch

from .._base.precision import accumulation_dtype, rows_at_a_time, rows_widened
from ..exchange import ExchangeUsed as ExchangeUsed
from ..exchange import num_entries
from ..exchange.schedule import full, half
from ..exchange.select import automatic
from ..partition import Partition
from ..sweep import Products, TokenBudget, bytes_of_winners, default_side, fit_tokens
from ..sweep.memory import Budget, Memory, bytes_of_an_entry, fit
from ..sweep.token_budget import TOKENS_OF_A_PART, at_once, bytes_of_flat
from .form import Form, built_in
from .sizes import PARTIAL_FC, WINNERS, LossName

_WINNER = 40  # entries of late interaction that take as long as a winner's gradients, sorted and added; with d = 128


class Kept(NamedTuple):
    """The part of exp(S), or of late interaction's winners, that is kept for the backward pass."""

    share: float  # from 0 to 1
    size: int  # bytes of an entry; `WINNERS` of late interaction
    bytes: int  # of all of it


@dataclass(frozen=True)
class Shapes:
    """The shapes of a step."""

    loss: LossName  # its name, one of `LOSSES`, or that of a declared loss
    batch_size: int  # B, examples on all ranks: pairs, or images of classes
    embedding_size: int  # d
    ranks: int = 1  # W
    dtype: torch.dtype = torch.float32  # of the features
    device: str = "cpu"  # or "cuda"; it decides the side of a tile
    classes: int = 0  # C, of PartialFC, on all ranks
    sample_rate: float = 1.0  # of PartialFC
    declared: Form | None = None  # the form of a declared loss; None: the loss is built in
    tile_side: int | None = None  # None: that of the device
    sample: int | None = None  # classes of a step on a rank, if they are known; None: as many as random labels have

    @property
    def form(self) -> Form:
        """Return what does not depend on sizes."""
        return built_in(self.loss) if self.declared is None else self.declared

    @property
    def has_classes(self) -> bool:
        """Return whether rows meet the centers of classes, as in PartialFC."""
        return self.loss == PARTIAL_FC

    @property
    def items_per_example(self) -> tuple[int, ...]:
        """Return how many inputs of each encoder an example has."""
        return (1,) * self.form.towers

    @property
    def sums(self) -> torch.dtype:
        """Return the dtype of sums and gradients."""
        return accumulation_dtype(self.dtype)

    @property
    def side(self) -> int:
        """Return the side of a tile."""
        return self.tile_side or default_side(torch.device(self.device))

    @property
    def products(self) -> Products:
        """Return the precision of products that "auto" chooses, with TF32 forbidden."""
        halves = self.device == "cuda" and self.dtype.itemsize == 2
        return Products(str(self.dtype).removeprefix("torch.")) if halves else Products()

    @property
    def rows(self) -> int:
        """Return b, of the rank with most rows."""
        return ceil(self.batch_size / self.ranks)

    @property
    def sampled(self) -> int:
        """Return the classes of a step on the rank with most, an upper bound that is rarely exceeded.

        They are the labels, and each of the other classes with one probability.
        """
        if self.sample is not None:
            return self.sample
        if self.sample_rate == 1:
            return ceil(self.classes / self.ranks)
        with_label = self.classes * (1 - (1 - 1 / self.classes) ** self.batch_size)
        others = self.classes - with_label
        deviation = (others * self.sample_rate * (1 - self.sample_rate) / self.ranks) ** 0.5
        expected = (with_label + self.sample_rate * others) / self.ranks
        return min(ceil(self.classes / self.ranks), ceil(expected + 3 * deviation))

    @property
    def partition(self) -> Partition:
        """Return which rank owns which rows of Y; of a symmetric S these are the rows of all views."""
        counts = Partition.even(self.batch_size, self.ranks).counts
        return Partition(tuple(self.form.rows_per_example * n for n in counts))

    @property
    def feature_bytes(self) -> int:
        """Return the bytes of all feature matrices on the rank with most; their gradients take as many."""
        return self.form.towers * self.rows * self.embedding_size * self.dtype.itemsize

    @property
    def center_bytes(self) -> int:
        """Return the bytes of PartialFC's centers, and of their gradient, which has a sample's rows or all."""
        centers = ceil(self.classes / self.ranks) + self.sampled if self.has_classes else 0
        return centers * self.embedding_size * self.dtype.itemsize

    @property
    def entries(self) -> int:
        """Return the entries of S on the first rank, which has most rows."""
        if self.has_classes:
            return self.sampled * self.batch_size
        columns = self.partition
        visits = half(columns, 0) if self.form.symmetric else full(columns.counts[0], columns, 0)
        return num_entries(visits, self.side)

    @property
    def weighted_entries(self) -> int:
        """Return the entries of S whose time is counted; in late interaction, with the gradients of winners."""
        return self.entries

    def exchange(self) -> ExchangeUsed:
        """Return the exchange that "auto" selects."""
        if self.has_classes:
            return "gather"
        return automatic(self.partition.total, self.embedding_size * self.sums.itemsize)

    def budget(self, memory: Memory) -> Budget:
        """Return the budget that `memory=` gives."""
        return fit(
            memory,
            entries=self.entries if self.kept_sizes() else 0,
            side=self.side,
            dtype=self.sums,
            bytes_of_entry=self.form.tiles * bytes_of_an_entry(self.sums, self.products),
            exact=self.form.exact,
        )

    def kept(self, memory: Memory) -> Kept:
        """Return the part of exp(S), or of winners, that the forward pass keeps for the backward pass."""
        budget = self.budget(memory)
        size = budget.kept_dtype.itemsize
        kept, most = budget.kept * size, self.memory_for(size) - self.memory_for(0)
        return Kept(min(1.0, kept / most) if most else 0.0, size, kept)

    def kept_sizes(self) -> tuple[int, ...]:
        """Return the bytes of a kept entry of exp(S), for each precision in which it can be kept."""
        if not self.form.keeps:
            return ()
        size = self.sums.itemsize
        return (size,) if size == 8 or self.form.exact else (2, size)

    def memory_for(self, itemsize: int) -> int:
        """Return the value of `memory=` that keeps everything, with `itemsize` bytes for each entry; for 0, nothing."""
        return self.side**2 * bytes_of_an_entry(self.sums, self.products) + self.entries * itemsize

    def named_sizes(self, memory: Memory) -> Mapping[str, float]:
        """Return the sizes whose products are the numbers of elements of a step's tensors."""
        rows = self.sampled if self.has_classes else self.partition.counts[0]
        side = self.budget(memory).side
        return {
            "kept": self.kept(memory).bytes,
            "batch": self.batch_size,
            "rows": self.rows,
            "centers": ceil(self.classes / self.ranks),
            "sampled": self.sampled if self.has_classes else 0,
            "side": (min(side, rows) * min(side, self.partition.total)) ** 0.5,
            **_parts(rows, self.embedding_size // self.form.similarities, torch.device(self.device)),
            "width": self.embedding_size / self.form.similarities,
        }


@dataclass(frozen=True)
class TokenShapes(Shapes):
    """The shapes of a step of late interaction. The tower with fewer tokens travels; its tiles hold items, not tokens.

    Numbers of tokens are means; tiles are planned as if all items had as many.
    """

    query_tokens: float = 1  # t, of a query, on average
    document_tokens: float = 1  # u, of a document, on average
    documents_per_query: int = 1  # k

    @property
    def items_per_example(self) -> tuple[int, ...]:
        return 1, self.documents_per_query

    @property
    def items(self) -> tuple[Partition, Partition]:
        """Return which rank owns which queries, and which documents."""
        queries = Partition.even(self.batch_size, self.ranks)
        return queries, Partition(tuple(self.documents_per_query * n for n in queries.counts))

    @property
    def tokens(self) -> tuple[Partition, Partition]:
        """Return which rank owns which tokens of queries, and of documents."""
        sides = zip(self.items, (self.query_tokens, self.document_tokens), strict=True)
        queries, documents = (Partition(tuple(ceil(each * n) for n in items.counts)) for items, each in sides)
        return queries, documents

    @property
    def longest(self) -> tuple[int, int]:
        """Return the tokens of a query, and of a document, in tiles."""
        return ceil(self.query_tokens), ceil(self.document_tokens)

    @property
    def documents_stay(self) -> bool:
        """Return whether queries travel, which have fewer tokens."""
        return self.query_tokens < self.documents_per_query * self.document_tokens

    @property
    def partition(self) -> Partition:
        """Return which rank owns which of the tokens that travel."""
        return self.tokens[1 - self.documents_stay]

    @property
    def staying(self) -> int:
        """Return the tokens on the rank with most of the tower that stays."""
        return max(self.tokens[self.documents_stay].counts)

    @property
    def feature_bytes(self) -> int:
        return (self.staying + max(self.partition.counts)) * self.embedding_size * self.dtype.itemsize

    @property
    def entries(self) -> int:
        """Return the products of tokens on the first rank, which has most."""
        return self.staying * self.partition.total

    @property
    def weighted_entries(self) -> int:
        return int(self.entries * (1 + _WINNER / self.document_tokens))

    @property
    def bytes_of_all_winners(self) -> int:
        """Return the bytes that keeping all winners of a rank takes, an integer for each query token and document."""
        (queries, documents), tokens = self.items, self.tokens[0]
        if self.documents_stay:
            form = tokens.total, documents.counts[0], queries.total
        else:
            form = tokens.counts[0], documents.total, queries.counts[0]
        return bytes_of_winners(*form, self.longest[1], self.sums)

    def budget(self, memory: Memory) -> TokenBudget:
        """Return the budget that `memory=` gives; `kept` counts bytes."""
        return fit_tokens(memory, longest=self.longest, side=self.side, dtype=self.sums, kept=self.bytes_of_all_winners)

    def kept_sizes(self) -> tuple[int, ...]:
        return (WINNERS,)

    def memory_for(self, itemsize: int) -> int:
        return bytes_of_flat(self.longest, self.side, self.sums) + (self.bytes_of_all_winners if itemsize else 0)

    def named_sizes(self, memory: Memory) -> Mapping[str, float]:
        """Return the sizes of a step's tensors: also those of the parts into which a tile of late interaction falls."""
        budget, longest, (queries, documents) = self.budget(memory), self.longest[1], self.items
        stay, travel = (documents, queries) if self.documents_stay else (queries, documents)
        rows, columns = min(budget.side, stay.counts[0]), min(budget.side, travel.total)
        in_tile = (columns, rows) if self.documents_stay else (rows, columns)
        tokens, device = ceil(in_tile[0] * self.query_tokens), torch.device(self.device)
        part_tokens = max(1, min(tokens, TOKENS_OF_A_PART, budget.products // longest))
        some, some_documents = at_once(tokens, in_tile[1], longest, self.embedding_size, budget.products, device)
        return {
            "kept": self.kept(memory).bytes,
            "batch": self.batch_size,
            "rows": self.rows,
            "query tokens": self.query_tokens,
            "document tokens": self.document_tokens,
            "side": (rows * columns) ** 0.5,
            "products": budget.products**0.5,
            "maxima": part_tokens * max(1, budget.products // part_tokens // longest),
            "tokens at once": some,
            "documents at once": min(some_documents, in_tile[1]),
            **_parts(self.staying, self.embedding_size, device),
            "width": self.embedding_size,
        }


def _parts(rows: int, width: int, device: torch.device) -> Mapping[str, float]:
    """Return how many rows are computed or widened at a time."""
    return {"some rows": min(rows, rows_at_a_time(device)), "widened rows": min(rows, rows_widened(width, device))}
