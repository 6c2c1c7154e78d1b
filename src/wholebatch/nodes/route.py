"""Choose the exchange that moves Y's rows in one sweep, and the memory of this rank's tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..comm import Communicator, LocalCommunicator
from ..contract import Facts
from ..exchange import Exchange, columns_of_a_chunk, num_entries, select_exchange
from ..partition import Partition, Ragged
from ..sweep import (
    LARGEST,
    Budget,
    Documents,
    Driver,
    KeptWinners,
    KernelMaxSimDriver,
    MaxSimDriver,
    Products,
    TokenBudget,
    bytes_of_an_entry,
    bytes_of_winners,
    columns_of_tiles,
    default_side,
    fit,
    fit_tokens,
    smallest_budget,
    smallest_token_budget,
)
from ..sweep.items import numbers_on

_SMALLEST_UNIT = torch.finfo(torch.float32).tiny
_NOBODY: Any = None  # the ranks of a route that no call has yet


@dataclass(frozen=True)
class Layout:
    """The owners of the rows and the columns of S."""

    rows: Partition  # the rows of X that each rank holds
    cols: Partition  # the rows of Y that each rank holds
    symmetric: bool = False  # whether Y is X, so that half of S suffices
    # replicated: whether every rank holds all of Y. Then `cols` has one part, nothing is communicated, and a column's
    # statistics are sums over this rank's rows only
    replicated: bool = False


@dataclass(eq=False)
class Route:
    """The ranks, the exchange between them, and the memory that this rank's sweep may allocate."""

    comm: Communicator
    exchange: Exchange  # between them
    budget: Budget  # the memory
    products: Products  # their precision
    tokens_in_kernels: bool = False  # of late interaction, whether kernels compute the tiles

    def over(self, comm: Communicator) -> Route:
        """Return the route of another call of the same form."""
        return Route(comm, self.exchange.over(comm), self.budget, self.products, self.tokens_in_kernels)

    def driver(self, x: Tensor, scale: float | Tensor, bias: float | Tensor = 0.0, *, in_units: bool = False) -> Driver:
        """Return a driver of X's rows, in tiles of the budget.

        With `in_units` the caller scales dS so that it fits into float16; else float16 factors are widened.
        """
        products = Products() if self.products.half == torch.float16 and not in_units else self.products
        return Driver(x, scale, bias, side=self.budget.side, largest=self.exchange.largest_block, products=products)


def choose_route(
    facts: Facts,
    layout: Layout,
    *,
    keep: bool = True,
    exact: bool = False,
    dtype: torch.dtype | None = None,
    times: int = 1,
) -> Route:
    """Return the exchange that the caller chose, or with "auto" the best one, and the memory of this rank's sweep.

    Args:
        facts: of the call.
        layout: of S.
        keep: whether exp(S) may be kept for the backward pass.
        exact: whether kept numbers must not be rounded.
        dtype: the dtype of the tiles; None: `facts.dtype`.
        times: how many times as many tiles as usual the sweep holds.

    Raises:
        ValueError: on every rank, if a rank's `memory` is too little for its part.
    """
    dtype = dtype or facts.dtype
    products = facts.products if dtype == facts.dtype else Products()
    form = (
        "route", layout.rows.counts, layout.cols.counts, layout.symmetric, layout.replicated,
        keep, exact, dtype, times, facts.kernels, facts.features_dtype, products.precision, products.units,
    )  # fmt: skip
    route = facts.once(form, lambda: _choose(facts, layout, keep, exact, dtype, times, products))
    return route.over(LocalCommunicator() if layout.replicated else facts.comm)


def _choose(
    facts: Facts, layout: Layout, keep: bool, exact: bool, dtype: torch.dtype, times: int, products: Products
) -> Route:
    side = default_side(facts.device)
    entry = times * bytes_of_an_entry(dtype, products)
    for rank, memory in enumerate(facts.of_ranks("memory")):
        needed = smallest_budget(layout.rows.counts[rank], layout.cols.total, entry)
        if isinstance(memory, int) and memory < needed:
            raise ValueError(
                f"{facts.caller}: memory must be at least {needed} bytes for the smallest tiles of rank {rank}, got "
                f"{memory}; pass more, or 'flat', which needs at most {side * side * entry} bytes"
            )
    comm = LocalCommunicator() if layout.replicated else facts.comm
    columns = columns_of_tiles(side, products.half or facts.features_dtype) if facts.kernels else side
    exchange = select_exchange(
        facts.options.exchange,
        comm,
        layout.rows.counts[facts.rank],
        layout.cols,
        row_bytes=facts.embedding_size * dtype.itemsize,
        symmetric=layout.symmetric,
        chunk=columns_of_a_chunk(layout.cols.total, columns, facts.device),
    )
    entries = num_entries(exchange.visits, side) if keep else 0
    budget = fit(facts.options.memory, entries=entries, side=side, dtype=dtype, bytes_of_entry=entry, exact=exact)
    return _shared(exchange, budget, products)


def _shared(exchange: Exchange, budget: Budget, products: Products) -> Route:
    """Return a route for `over`, of which many calls make their own."""
    assert exchange.largest_block is not None  # computed here, once, as the next
    assert exchange.kept_local is not None
    exchange.comm = _NOBODY  # the plans of a group must not keep it alive
    return Route(_NOBODY, exchange, budget, products)


def unit_of_gradients(largest: Tensor) -> Tensor:
    """Return a number, (), such that dS / unit fits into float16, from a bound of |dS| that is the same on all ranks.

    It is a normal number of float32 even if all of dS is 0.
    """
    return largest.mul(1 / LARGEST).clamp_(min=_SMALLEST_UNIT)


@dataclass(frozen=True)
class Vectors:
    """The vectors that the rows and columns of S consist of, in late interaction."""

    rows: Ragged  # the rows of all ranks
    cols: Ragged  # the columns of all ranks
    # documents: what documents are in S: each query vector takes its best match among a document's
    documents: Documents = "columns"

    @property
    def longest(self) -> tuple[int, int]:
        """The most vectors of a query, and of a document, on any rank."""
        rows, cols = (max(side.lengths, default=1) for side in (self.rows, self.cols))
        return (rows, cols) if self.documents == "columns" else (cols, rows)


def items_of_ranks(facts: Facts, lengths: Sequence[int], items: Partition) -> Ragged:
    """Return the items of all ranks, from the number of vectors of each local one. Collective: one all-gather."""
    if facts.comm.size > 1:
        lengths = facts.all_gather(numbers_on(lengths, facts.device), items).tolist()
    return _ragged(items, tuple(lengths))


_ragged = lru_cache(maxsize=8)(Ragged)  # which calls with items of these lengths share


def choose_token_route(facts: Facts, vectors: Vectors) -> Route:
    """Return the exchange of late interaction, and the memory of this rank's sweep; else as `choose_route`.

    Raises:
        ValueError: on every rank, if a rank's `memory` is too little for the longest document.
    """
    form = (
        vectors, facts.options.exchange, facts.of_ranks("memory"), facts.embedding_size,
        facts.dtype, facts.device, facts.products, facts.differentiable,
    )  # fmt: skip
    kept: list[tuple[Any, Route]] = facts.comm.transport.kept_as("token route", list)
    latest = kept[0] if kept else None  # one for all forms: numbers of tokens differ from call to call
    if latest is None or latest[0] != form:
        latest = form, _choose_token_route(facts, vectors)
        kept[:] = [latest]
    return latest[1].over(facts.comm)


def _choose_token_route(facts: Facts, vectors: Vectors) -> Route:
    dtype, side, longest = facts.dtype, default_side(facts.device), vectors.longest
    needed = smallest_token_budget(longest[1], dtype)
    for rank, memory in enumerate(facts.of_ranks("memory")):
        if isinstance(memory, int) and memory < needed:
            raise ValueError(
                f"{facts.caller}: memory must be at least {needed} bytes for the {longest[1]} tokens of the longest "
                f"document, got {memory} on rank {rank}; pass more, or 'flat'"
            )
    rows, cols = vectors.rows, vectors.cols
    exchange = select_exchange(
        facts.options.exchange,
        facts.comm,
        rows.items.counts[facts.rank],
        cols.items,
        row_bytes=facts.embedding_size * dtype.itemsize,
        chunk=columns_of_a_chunk(cols.items.total, side, facts.device),
        ragged=cols,
    )
    local = rows.vectors.counts[facts.rank], rows.items.counts[facts.rank]
    (tokens, queries), documents = local, cols.items.total
    if vectors.documents == "rows":
        tokens, queries, documents = cols.vectors.total, cols.items.total, local[1]
    kept = bytes_of_winners(tokens, documents, queries, longest[1], dtype) if facts.differentiable else 0
    budget = fit_tokens(facts.options.memory, longest=longest, side=side, dtype=dtype, kept=kept)
    return _shared(exchange, budget, facts.products)


def token_driver(
    route: Route,
    x: Tensor,
    vectors: Vectors,
    *,
    winners: bool,
    kept: Tensor | None = None,
) -> MaxSimDriver:
    """Return a driver of the local rows' vectors, (n, d); with winners, which may be kept, where a gradient follows."""
    assert isinstance(route.budget, TokenBudget)
    kind = KernelMaxSimDriver if route.tokens_in_kernels else MaxSimDriver
    return kind(
        x,
        vectors.rows.local(route.comm.rank),
        vectors.cols,
        documents=vectors.documents,
        budget=route.budget,
        largest=route.exchange.largest_block,
        products=route.products,
        winners=winners,
        kept=None if kept is None else KeptWinners(kept),
    )
