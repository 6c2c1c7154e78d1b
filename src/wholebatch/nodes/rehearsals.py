"""A call's node on random features, for the check of its kernels: the call's pairs, fields and dtype, a few rows.

The rows are this rank's first ones. The columns begin with the columns of these rows, so that positives are among them.
The scale is moderate: it is a number to a kernel, and large ones would only magnify the rounding of products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import TypeAlias

import torch
from torch import Tensor

from .._base.precision import wide_dtype
from ..comm import LocalCommunicator
from ..contract import Facts
from ..exchange import ColumnData, Exchange, Initial
from ..exchange.exchange import Op, VisitBlock
from ..partition import Partition, Ragged, tiles
from ..sweep import Block, KernelMaxSimDriver, MaxSimDriver, TokenBudget, integer_for
from .kernel_check import Sizes, random_numbers, random_rows, use_kernels
from .route import Layout, Route, Vectors

SHIFT = 3.0  # of a rehearsal's exponentials
_SHORT = (1, 2, 3, 5, 8, 13)  # documents in which every token wins for some query
_TOKENS_OF_A_PROGRAM = 64  # of a document, at most: so many more programs are started

NodeCall: TypeAlias = tuple[list[Tensor], Callable[[], Sequence[Tensor]]]
"""Leaves, and a function that returns a node's outputs for them."""
Node: TypeAlias = Callable[[Route, Tensor, Tensor, bool], NodeCall]
"""The node of a call on other rows: from its route, X, Y (X, if S is symmetric), and whether kernels compute."""


def moderate_scale(features: int) -> float:
    """Return the scale of a rehearsal: products of a few features are large."""
    return min(14.3, 5.0 * features**0.5)


class _OneBlock(Exchange):
    """Some columns of a call, whose rows of Y are on this process: one block, and for a symmetric S its triangle."""

    def __init__(self, exchange: Exchange, rows: slice, cols: slice) -> None:
        super().__init__(LocalCommunicator(), rows.stop, exchange.columns, symmetric=exchange.symmetric)
        self.largest_block = rows.stop, cols.stop - cols.start
        self._rows, self._cols = rows, cols

    @property
    def kept_local(self) -> slice:
        return slice(None)

    def fetch(self, y_local: Tensor) -> Tensor:
        return y_local

    def distribute(self, numbers: Tensor) -> Tensor:
        return numbers

    def for_all_columns(self, numbers: Tensor) -> Tensor:
        before = numbers.new_ones(self._cols.start, *numbers.shape[1:])
        return torch.cat([before, numbers])

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
        accumulated = None if initial is None else initial(len(fetched))
        columns = ColumnData(carried, accumulated, accumulated if self.symmetric else None)
        for triangle in (True, False) if self.symmetric else (False,):  # other ranks' columns are no triangle
            visit(Block(fetched, self._cols, self._rows, triangle), columns)
        return accumulated

    def reduce(self, accumulated: Tensor, op: Op) -> Tensor:
        return accumulated


@dataclass(frozen=True)
class NodeRehearsal:
    """The rehearsal of a node that passes over rows and columns of S."""

    facts: Facts
    route: Route
    layout: Layout  # of S
    dtype: torch.dtype  # of the features
    node: Node
    # timed: makes the step whose time decides, from its rows and whether kernels compute, or None: the node's does
    timed: Callable[[int, bool], Callable[[], None] | None] | None = None
    group: int = 1  # rows that belong together
    checked: Node | None = None  # the node with those that calls of the form may take instead, which are not timed

    def __call__(self, sizes: Sizes, *, in_kernels: bool) -> Callable[[], None]:
        """Return a function that computes the node's outputs, and gradients where the call has them."""
        facts, layout, device = self.facts, self.layout, self.facts.device
        if sizes.as_called and self.timed is not None:
            step = self.timed(isqrt(sizes.rows * sizes.cols), in_kernels)
            if step is not None:
                return step
        first = 0 if layout.replicated else layout.cols.offsets[facts.rank]
        count, number = min(sizes.rows, layout.rows.counts[facts.rank]), min(sizes.cols, layout.cols.total - first)
        if layout.symmetric:
            count = number = min(count, number)
        count -= count % self.group
        if not count or not number:
            return lambda: None
        like = torch.empty(0, dtype=self.dtype, device=device)
        x, y = (random_rows(n, facts.embedding_size, like, seed) for seed, n in enumerate((count, number)))
        budget = self.route.budget
        route = Route(
            LocalCommunicator(),
            _OneBlock(self.route.exchange, slice(0, count), slice(first, first + number)),
            replace(budget, side=min(sizes.side, budget.side), kept=min(budget.kept, count * number)),
            self.route.products,
        )
        node = self.node if sizes.as_called or self.checked is None else self.checked
        leaves, outputs_of = node(route, x, x if layout.symmetric else y, in_kernels)
        weights: list[Tensor] = []

        def run() -> None:
            outputs = [output for output in outputs_of() if output.requires_grad]
            if not outputs:
                return
            if not weights:  # of different signs; a row without candidates has none
                for seed, output in enumerate(outputs, 4):
                    numbers = random_numbers(output.numel(), device, seed).view(output.shape).to(output)
                    weights.append(((-1) ** seed / count * numbers).where(output.isfinite(), 0.0))
            torch.autograd.grad(outputs, [x for x in leaves if x.requires_grad], weights, allow_unused=True)

        return run


@dataclass(frozen=True)
class MaxSimRehearsal:
    """The rehearsal of late interaction: items as long as the call's, the longest one, and short ones.

    Every other item consists of small whole numbers. Their products are exact, and many are equal, so that the choice
    among equal tokens shows; the random ones show rounding.
    """

    facts: Facts
    route: Route
    vectors: Vectors

    @property
    def layout(self) -> Layout:
        """The owners of tokens."""
        return Layout(self.vectors.rows.vectors, self.vectors.cols.vectors)

    def __call__(self, sizes: Sizes, *, in_kernels: bool) -> Callable[[], None]:
        """Return a function that makes one sweep."""
        facts, vectors, budget = self.facts, self.vectors, self.route.budget
        # Of tiles, and of a matrix, whose forms are checked and not timed.
        given_dtypes = (facts.dtype,) if sizes.as_called else (facts.dtype, facts.features_dtype)
        empty = (torch.empty(0, dtype=dtype, device=facts.device) for dtype in given_dtypes)
        dtypes = dict.fromkeys(facts.products.rounded(tokens).dtype for tokens in empty)
        if not vectors.rows.lengths or not vectors.cols.lengths:
            return lambda: None
        sides = ("rows", vectors.rows, sizes.rows), ("columns", vectors.cols, sizes.cols)
        items = [[self._items(name, side.lengths, count, dtype) for name, side, count in sides] for dtype in dtypes]
        assert isinstance(budget, TokenBudget)
        most = max(min(sizes.side**2, budget.products), vectors.longest[1])
        kind, small = KernelMaxSimDriver if in_kernels else MaxSimDriver, min(sizes.side, budget.side)

        def sweep(rows: Ragged, x: Tensor, cols: Ragged, y: Tensor, *, winners: bool) -> None:
            driver = kind(
                x,
                rows,
                cols,
                documents=vectors.documents,
                budget=TokenBudget(small, 0, torch.uint8, most),
                largest=(len(rows.lengths), len(cols.lengths)),
                products=self.route.products,
                winners=winners,
            )
            sums = dict.fromkeys((driver.dtype, facts.features_dtype) if driver.adds_once else (driver.dtype,))
            block = Block(y, slice(0, len(cols.lengths)), slice(0, len(rows.lengths)))
            for tile in tiles(block.rows, block.cols, driver.side):
                factors = driver.factors(tile, block)
                if not sizes.as_called:
                    part = torch.empty(tile.shape, dtype=wide_dtype(x.device), device=x.device)
                    driver.logits(tile, *factors, out=part)
                s = driver.logits(tile, *factors)
                tile_winners, grad = driver.winners, s.mul_(1 / len(y))
                for sum_dtype in sums if winners else ():  # gradients of one tile are in the dtype of features
                    driver.winners = tile_winners
                    u, v = (torch.zeros(z.shape, dtype=sum_dtype, device=z.device) for z in (x, y))
                    driver.products(grad, tile, *factors, block, u, v)

        def run() -> None:
            for row_side, col_side in items:
                for winners in (False, True) if facts.differentiable else (False,):
                    sweep(*row_side, *col_side, winners=winners)

        return run

    def _items(self, side: str, lengths: tuple[int, ...], count: int, dtype: torch.dtype) -> tuple[Ragged, Tensor]:
        """Return items with about `count` vectors, and these."""
        are_documents = side == self.vectors.documents
        lengths = _sample_lengths(lengths, count, count // _TOKENS_OF_A_PROGRAM if are_documents else 1)
        size, like = self.facts.embedding_size, torch.empty(0, dtype=dtype, device=self.facts.device)
        items = list(random_rows(sum(lengths), size, like, int(are_documents)).split(lengths))
        generator = torch.Generator().manual_seed(int(are_documents))
        for i in range(0, len(items), 2):
            items[i] = torch.randint(-2, 3, (lengths[i], size), generator=generator, device="cpu").to(like)
        return Ragged(Partition((len(lengths),)), lengths), torch.cat(items)


def _sample_lengths(lengths: tuple[int, ...], vectors: int, items: int) -> tuple[int, ...]:
    """Return twice the longest of these lengths, short ones, and further ones of these.

    There are at least so many vectors and items, unless the call has fewer.
    """
    longest = max(lengths)
    chosen = [longest, longest, *(short for short in _SHORT if short < longest)]
    vectors, items = min(vectors, sum(lengths)), min(items, len(lengths))
    while sum(chosen) < vectors or len(chosen) < items:
        chosen.append(lengths[len(chosen) % len(lengths)])
    return tuple(chosen)


def tokens_in_kernels_or_not(facts: Facts, route: Route, vectors: Vectors) -> Route:
    """Return the route of late interaction, in kernels if they passed their check. Collective at a form's first call.

    Raises:
        ValueError: on every rank, for kernel="triton", if kernels failed on any of them.
    """
    longest = vectors.longest[1]
    form = (vectors.documents, str(integer_for(longest)), longest.bit_length())
    rehearsal = MaxSimRehearsal(facts, route, vectors)
    route.tokens_in_kernels = use_kernels(facts, form, rehearsal.layout, lambda: rehearsal)
    return route
