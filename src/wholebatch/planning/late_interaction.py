"""Late interaction in the planner: its shapes, and the work of its step.

A rank has b queries of t tokens and k b documents of u tokens, all W ranks have B and k B; a token has d numbers.

    multiply-adds     2 units of (b t)(k B u) d, or of (B t)(k b u) d where documents stay: forward, and again backward
                      to find winners; 1 unit for winners that are kept
    entries           products of tokens, (b t)(k B u), of which a maximum is taken; and 40 for each winner, whose
                      gradients are sorted and added: that takes as long, with d = 128 on a CPU
    memory            tiles:     a buffer of products, winners of a tile, two tiles of S
                      gradients: of the tokens that stay, and of a few documents of a tile once more
                      and as other losses, with tokens that travel instead of Y's rows
    winners kept      an integer for each query token and document, of 8 bits for documents of up to 256 tokens, and S

The tower with fewer tokens travels. Numbers of tokens are means; tiles are planned as if all items had as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from .._base.precision import accumulation_dtype
from ..exchange import ExchangeUsed
from ..exchange.select import automatic
from ..losses.catalog import Declaration
from ..partition import Partition
from ..sweep import TokenBudget, bytes_of_winners, fit_tokens
from ..sweep.memory import Memory
from ..sweep.token_budget import at_once, bytes_of_flat, integer_for
from .costs import TRANSFERS, Work
from .shapes import Shapes
from .sizes import WINNERS

_WINNER = 40  # entries
_GRAPH = 15  # bytes for each entry of a tile of S, of scores, masks and their gradients


@dataclass(frozen=True)
class TokenShapes(Shapes):
    """The shapes of a step of late interaction.

    Args:
        query_tokens: t, of a query, on average.
        document_tokens: u, of a document, on average.
        documents_per_query: k.
    """

    query_tokens: float = 1
    document_tokens: float = 1
    documents_per_query: int = 1

    @property
    def entry(self) -> Declaration | None:
        """Return None: a standard call has rows of features."""
        return None

    @property
    def towers(self) -> int:
        return 2

    @property
    def size(self) -> int:
        return self.sums_size

    @property
    def queries(self) -> Partition:
        """Return which rank owns which queries."""
        return Partition.even(self.batch_size, self.ranks)

    @property
    def documents(self) -> Partition:
        """Return which rank owns which documents."""
        return Partition(tuple(self.documents_per_query * n for n in self.queries.counts))

    @property
    def items_per_example(self) -> tuple[int, ...]:
        return 1, self.documents_per_query

    @property
    def documents_stay(self) -> bool:
        """Return whether queries travel, which have fewer tokens."""
        return self.query_tokens < self.documents_per_query * self.document_tokens

    @property
    def columns(self) -> Partition:
        return self.queries if self.documents_stay else self.documents

    @property
    def partition(self) -> Partition:
        """Return which rank owns which of the tokens that travel."""
        each = self.query_tokens if self.documents_stay else self.document_tokens
        return _tokens(self.columns, each)

    @property
    def staying(self) -> int:
        items, each = (
            (self.documents, self.document_tokens) if self.documents_stay else (self.queries, self.query_tokens)
        )
        return max(_tokens(items, each).counts)

    @property
    def vectors(self) -> int:
        return self.staying + max(self.partition.counts)

    @property
    def longest(self) -> tuple[int, int]:
        """Return the tokens of a query, and of a document, in tiles."""
        return ceil(self.query_tokens), ceil(self.document_tokens)

    @property
    def entries(self) -> int:
        """Return the products of tokens on the first rank, which has most."""
        return self.staying * self.partition.total

    @property
    def bytes_of_all_winners(self) -> int:
        """Return the bytes that keeping all winners of a rank takes."""
        rows = (self.documents if self.documents_stay else self.queries).counts[0]
        if self.documents_stay:
            tokens, documents, queries = self.partition.total, rows, self.queries.total
        else:
            tokens, documents, queries = self.staying, self.documents.total, rows
        return bytes_of_winners(tokens, documents, queries, self.longest[1], accumulation_dtype(self.dtype))

    def exchange(self) -> ExchangeUsed:
        return automatic(self.partition.total, self.embedding_size * self.sums_size)

    def budget(self, memory: Memory) -> TokenBudget:
        """Return the budget that `memory=` gives; `kept` counts bytes."""
        return fit_tokens(
            memory,
            longest=self.longest,
            side=self.side,
            dtype=accumulation_dtype(self.dtype),
            kept=self.bytes_of_all_winners,
        )

    def memory_for(self, itemsize: int) -> int:
        """Return the value of `memory=` that keeps all winners; for 0, that of a flat sweep."""
        flat = bytes_of_flat(self.longest, self.side, accumulation_dtype(self.dtype))
        return flat + (self.bytes_of_all_winners if itemsize else 0)

    def kept_sizes(self) -> tuple[int, ...]:
        return (WINNERS,)


def work_of_tokens(shapes: TokenShapes, exchange: ExchangeUsed, memory: Memory) -> Work:
    """Return the work of a step of late interaction with these settings.

    >>> work = work_of_tokens(TokenShapes("max_sim", 64, 128, query_tokens=32, document_tokens=180), "gather", "flat")
    >>> work.flops / (2 * (64 * 32) * (64 * 180) * 128)
    2.0
    """
    budget, products = shapes.budget(memory), shapes.entries
    share = budget.kept / shapes.bytes_of_all_winners
    again = 2 * shapes.embedding_size * products * (1 - share)
    entries = int(products * (1 + _WINNER / shapes.document_tokens))
    alone = shapes.ranks == 1
    transfer = TRANSFERS[exchange](shapes)
    return Work(
        flops=2 * shapes.embedding_size * products + again,
        again=again,
        entries=entries,
        kept=int(entries * share),
        kept_size=WINNERS,
        features=shapes.vectors * shapes.embedding_size * shapes.dtype.itemsize,
        centers=0,
        loss=_peak(shapes, exchange, budget),
        wire=0.0 if alone else transfer.wire,
        messages=0 if alone else transfer.messages,
    )


def _peak(shapes: TokenShapes, exchange: ExchangeUsed, budget: TokenBudget) -> int:
    """Return the most bytes that are held at a time: in the forward sweep, in the backward sweep, or after it."""
    a, d, alone = shapes.sums_size, shapes.embedding_size, shapes.ranks == 1
    transfer = TRANSFERS[exchange](shapes)
    numbers = shapes.vectors * d
    rows, fetched, reducing = (numbers * a, 0, 0) if alone else (transfer.rows, transfer.fetched, transfer.reducing)
    rounded = numbers * shapes.dtype.itemsize if shapes.dtype.itemsize < a else 0
    widened = numbers * a if rounded else 0
    products = budget.products * a
    forward, backward, between = _bytes_of_tile(shapes, budget, transfer.columns)
    if budget.kept < shapes.bytes_of_all_winners:
        backward += products  # else the backward pass has none
    return widened + max(
        fetched + budget.kept + products + forward,
        rows - reducing + budget.kept + backward,
        rows + budget.kept + between + rounded,
    )


def _bytes_of_tile(shapes: TokenShapes, budget: TokenBudget, columns: int) -> tuple[int, int, int]:
    """Return the bytes of a tile in the forward pass, in the backward pass, and of the buffers that stay after it.

    Products are not included.
    """
    a, longest, d = shapes.sums_size, shapes.longest[1], shapes.embedding_size
    staying = (shapes.documents if shapes.documents_stay else shapes.queries).counts[0]
    rows, columns = min(budget.side, staying), min(budget.side, columns)
    queries, documents = (columns, rows) if shapes.documents_stay else (rows, columns)
    tokens = ceil(queries * shapes.query_tokens)
    of_tile = rows * columns * (2 * a + _GRAPH)
    forward = of_tile + budget.products // longest * (2 * a + 8)
    found_again = (
        0 if budget.kept >= shapes.bytes_of_all_winners else tokens * documents * integer_for(longest).itemsize
    )
    some, of_some = at_once(tokens, documents, longest, d, budget.products, torch.device(shapes.device))
    of_some = min(of_some, documents)
    index, weights, vectors = 8 * some * of_some, a * some * of_some, ceil(of_some * shapes.document_tokens)
    adding = max(
        index + weights + some * d * a,  # to query tokens
        4 * index + 2 * weights + vectors * (d * a + 3 * 8),  # to tokens of documents, after sorting
    )
    return forward, of_tile + found_again + adding, rows * columns * 2 * a


def _tokens(items: Partition, each: float) -> Partition:
    return Partition(tuple(ceil(each * n) for n in items.counts))
