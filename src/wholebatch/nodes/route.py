"""Choose the exchange that moves Y's rows in one sweep, and the memory of this rank's tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Communicator, LocalCommunicator
from ..contract import Facts
from ..exchange import Exchange, columns_of_a_chunk, num_entries, select_exchange
from ..partition import Partition
from ..sweep import Budget, Driver, Products, bytes_of_an_entry, columns_of_tiles, default_side, fit, smallest_budget


@dataclass(frozen=True)
class Layout:
    """The owners of the rows and the columns of S.

    Args:
        rows: the rows of X that each rank holds.
        cols: the rows of Y that each rank holds.
        symmetric: whether Y is X, so that half of S suffices.
        replicated: whether every rank holds all of Y. Then `cols` has one part, nothing is communicated, and a column's
            statistics are sums over this rank's rows only.
    """

    rows: Partition
    cols: Partition
    symmetric: bool = False
    replicated: bool = False


@dataclass(frozen=True)
class Route:
    """The ranks, the exchange between them, and the memory that this rank's sweep may allocate."""

    comm: Communicator
    exchange: Exchange
    budget: Budget
    products: Products

    def driver(self, x: Tensor, scale: float, bias: float = 0.0, *, in_units: bool = False) -> Driver:
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
    side, dtype, products = default_side(facts.device), dtype or facts.dtype, facts.products
    if dtype != facts.dtype:
        products = Products()
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
    return Route(comm, exchange, budget, products)
