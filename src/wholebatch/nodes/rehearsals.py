"""A call's sweep on random features, for the check of its kernels: the call's pairs, fields and dtype, a few rows.

The rows are this rank's first ones. The columns begin with the columns of these rows, so that positives are among them.
The scale is moderate: it is a number to a kernel, and large ones would only magnify the rounding of products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import TypeAlias

import torch
from torch import Tensor

from .._base.normalize import inverse_norms
from .._base.precision import accumulation_dtype, wide_dtype
from ..contract import Facts
from ..partition import Partition, Ragged, tiles
from ..sweep import (
    Block,
    KernelMaxSimDriver,
    MaxSimDriver,
    SoftmaxSweep,
    Sums,
    TokenBudget,
    Weights,
    integer_for,
)
from .kernel_check import Sizes, random_numbers, random_rows, use_kernels
from .nested_plan import NestedPlan
from .route import Layout, Route, Vectors, choose_route
from .sigmoid import SigmoidPlan
from .softmax_plan import Data, SoftmaxPlan

_SHIFT, _BIAS = 3.0, -4.0
_SHORT = (1, 2, 3, 5, 8, 13)  # documents in which every token wins for some query
_TOKENS_OF_A_PROGRAM = 64  # of a document, at most: so many more programs are started
_MakeSweep: TypeAlias = Callable[[Tensor | None], SoftmaxSweep]  # from the memory of exponentials


def moderate_scale(features: int) -> float:
    """Return the scale of a rehearsal: products of a few features are large."""
    return min(14.3, 5.0 * features**0.5)


@dataclass(frozen=True)
class _Rows:
    """The rows and columns of a rehearsal, and their features."""

    rows: slice
    cols: slice
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, facts: Facts, layout: Layout, sizes: Sizes, dtype: torch.dtype, count: int) -> _Rows | None:
        """Return random features for some of this rank's `count` rows; None if it has no rows or no columns."""
        first = 0 if layout.replicated else layout.cols.offsets[facts.rank]
        rows, cols = min(sizes.rows, count), min(sizes.cols, layout.cols.total - first)
        if layout.symmetric:
            rows = cols = min(rows, cols, layout.rows.counts[facts.rank])
        if not rows or not cols:
            return None
        like = torch.empty(0, dtype=dtype, device=facts.device)
        x, y = (random_rows(n, facts.embedding_size, like, seed) for seed, n in enumerate((rows, cols)))
        return cls(slice(0, rows), slice(first, first + cols), x, x if layout.symmetric else y)

    def within(self, route: Route, sizes: Sizes) -> Route:
        """Return a route for one block of these rows and columns, in tiles of the sizes' side, or of its own."""
        exchange = route.exchange.over(route.comm)
        exchange.largest_block = len(self.x), len(self.y)
        return replace(route, exchange=exchange, budget=replace(route.budget, side=min(sizes.side, route.budget.side)))


@dataclass(frozen=True)
class SoftmaxRehearsal:
    """The rehearsal of a softmax."""

    facts: Facts
    plan: SoftmaxPlan
    layout: Layout  # of S
    dtype: torch.dtype  # of X's and Y's rows when a sweep gets them
    keeps: bool  # whether exponentials may be kept on any rank
    offsets: bool  # whether the rows' offsets need a gradient
    # timed: makes the step whose time decides, from its rows and whether kernels compute, or None: the sweep's does
    timed: Callable[[int, bool], Callable[[], None] | None] | None = None

    def __call__(self, sizes: Sizes, *, in_kernels: bool) -> Callable[[], None]:
        """Return a function that makes one sweep."""
        plan, layout, device = self.plan, self.layout, self.facts.device
        if sizes.as_called and self.timed is not None:
            step = self.timed(isqrt(sizes.rows * sizes.cols), in_kernels)
            if step is not None:
                return step
        of = _Rows.of(self.facts, layout, sizes, self.dtype, layout.rows.counts[self.facts.rank])
        if of is None:
            return lambda: None
        norms = col_norms = None
        x, y = of.x, of.y
        if plan.towers.normalize_per_tile or plan.towers.stay_norms is not None:
            norms = random_numbers(len(x), device, 2)[:, None].to(accumulation_dtype(self.dtype))
            x = (x * norms).to(x.dtype)
        if plan.towers.normalize_per_tile or plan.towers.travel_norms is not None:
            col_norms = random_numbers(layout.cols.total, device, 3)[:, None].to(accumulation_dtype(self.dtype))
            y = (y * col_norms[of.cols]).to(y.dtype)
        block = Block(y, of.cols, of.rows, triangle=layout.symmetric)
        buffers: list[Tensor | None] = [None]
        if plan.keep if sizes.as_called else self.keeps:
            budget, entries = plan.route.budget, len(x) * len(y)
            kept_dtype = budget.kept_dtype if budget.kept else accumulation_dtype(self.dtype)
            if sizes.as_called:
                buffers, entries = [], min(entries, budget.kept)
            buffers.append(x.new_empty(entries, dtype=kept_dtype))

        route = of.within(plan.route, sizes)
        made = replace(plan, route=route, scale=moderate_scale(self.facts.embedding_size), in_kernels=in_kernels)
        sweep = partial(made.sweep, Data(x, y, norms, col_norms))

        def run() -> None:
            for kept in buffers:
                self._sums(sweep, kept, block)
                if plan.differentiable:
                    self._gradients(sweep, kept, block, x, y)

        return run

    def _sums(self, sweep: _MakeSweep, kept: Tensor | None, block: Block) -> None:
        plan, one, count = self.plan, sweep(kept), len(block.y)
        rows = plan.cols if plan.symmetric else plan.rows
        one.sums(block, self._fields(rows, one.driver.count), self._fields(plan.cols, count))
        if plan.symmetric:  # blocks of other ranks' columns sum both, too
            block = replace(block, triangle=False)
            sweep(None).sums(block, self._fields(rows, one.driver.count), self._fields(plan.cols, count))

    def _fields(self, names: tuple[str, ...], count: int) -> Sums | None:
        if not names:
            return None
        device = self.facts.device
        return Sums(_SHIFT, {name: torch.zeros(count, dtype=wide_dtype(device), device=device) for name in names})

    def _gradients(self, sweep: _MakeSweep, kept: Tensor | None, block: Block, x: Tensor, y: Tensor) -> None:
        plan, dtype = self.plan, accumulation_dtype(x.dtype)
        row_names = plan.cols if plan.symmetric else plan.rows
        rows, cols = self._weights(row_names, len(x), 4), self._weights(plan.cols, len(y), 5)
        u, v = (torch.zeros(z.shape, dtype=dtype, device=z.device) for z in (x, y))
        offsets = None
        if self.offsets:
            offsets = torch.zeros(len(x), dtype=dtype, device=x.device)
        sweep(kept).gradients(block, rows, cols, u, u if plan.symmetric else v, offsets)
        if plan.symmetric:
            sweep(None).gradients(replace(block, triangle=False), rows, cols, u, v, offsets)

    def _weights(self, names: tuple[str, ...], count: int, seed: int) -> Weights | None:
        if not names:
            return None
        wide = wide_dtype(self.facts.device)
        made = random_numbers(count, self.facts.device, seed).to(wide)
        return Weights(
            _SHIFT,
            made / count,
            -made.flip(0) if "target" in names else None,
            made / count if "logits" in names else None,
        )


@dataclass(frozen=True)
class SigmoidRehearsal:
    """The rehearsal of a loss that is a sum over the entries of S, perhaps with weights, or a gradient of the bias."""

    facts: Facts
    plan: SigmoidPlan
    layout: Layout
    weighted: bool
    bias: bool

    def __call__(self, sizes: Sizes, *, in_kernels: bool) -> Callable[[], None]:
        """Return a function that makes one sweep."""
        facts = self.facts
        dtype = facts.products.half or facts.features_dtype
        of = _Rows.of(facts, self.layout, sizes, dtype, self.layout.rows.counts[facts.rank])
        if of is None:
            return lambda: None
        plan = replace(
            self.plan,
            route=of.within(self.plan.route, sizes),
            scale=moderate_scale(facts.embedding_size),
            bias=_BIAS,
            in_kernels=in_kernels,
        )
        weights = random_numbers(len(of.x), facts.device, 2) if self.weighted else None
        block, accumulate = Block(of.y, of.cols, of.rows), accumulation_dtype(dtype)

        def run() -> None:
            u, v = (torch.zeros(z.shape, dtype=accumulate, device=z.device) for z in (of.x, of.y))
            if self.plan.differentiable:
                plan.sweep(of.x, weights).block(block, u, v, bias=self.bias)
            if not self.plan.differentiable or self.plan.per_row:
                plan.sweep(of.x, None).block(block, None, None, bias=False)

        return run


@dataclass(frozen=True)
class NestedRehearsal:
    """The rehearsal of several nested S."""

    facts: Facts
    plan: NestedPlan
    layout: Layout

    def __call__(self, sizes: Sizes, *, in_kernels: bool) -> Callable[[], None]:
        """Return a function that makes one sweep."""
        facts, parts = self.facts, self.plan.parts
        given = facts.inputs["queries"].dtype
        of = _Rows.of(facts, self.layout, sizes, given, self.layout.rows.counts[facts.rank])
        if of is None:
            return lambda: None
        accumulate, wide = accumulation_dtype(given), wide_dtype(facts.device)
        inverse = [inverse_norms(z, parts.dims, accumulate) for z in (of.x, of.y)]
        plan = replace(
            self.plan, route=of.within(self.plan.route, sizes), scale=moderate_scale(facts.embedding_size), shift=_SHIFT
        )
        if not in_kernels:
            plan = replace(plan, kernel_dtype=None)
        block = Block(torch.cat([of.y.to(accumulate), inverse[1]], dim=1), of.cols, of.rows)

        def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
            made = random_numbers(count * len(parts.dims), facts.device, seed).to(dtype)
            return made.view(count, len(parts.dims)) / count

        def run() -> None:
            rows, targets, cols = (
                torch.zeros(len(z), len(parts.dims), dtype=wide, device=facts.device) for z in (of.x, of.x, of.y)
            )
            plan.sweep(of.x, inverse[0]).sums(block, rows, targets, cols if parts.symmetric else None)
            if facts.differentiable:
                u, v = (torch.zeros(z.shape, dtype=accumulate, device=z.device) for z in (of.x, of.y))
                weights = [numbers(n, wide, seed) for seed, n in ((6, len(of.x)), (7, len(of.x)), (8, len(of.y)))]
                by_col = weights[2] if parts.symmetric else None
                plan.sweep(of.x, inverse[0]).gradients(
                    block, weights[0], -weights[1], by_col, u, v, rows, cols.to(accumulate)
                )

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
        dtype = facts.products.rounded(torch.empty(0, dtype=facts.dtype, device=facts.device)).dtype
        if not vectors.rows.lengths or not vectors.cols.lengths:
            return lambda: None
        (rows, x), (cols, y) = (
            self._items(side, of.lengths, count, dtype)
            for side, of, count in (("rows", vectors.rows, sizes.rows), ("columns", vectors.cols, sizes.cols))
        )
        assert isinstance(budget, TokenBudget)
        most = max(min(sizes.side**2, budget.products), vectors.longest[1])
        kind, small = KernelMaxSimDriver if in_kernels else MaxSimDriver, min(sizes.side, budget.side)

        def sweep(*, winners: bool) -> None:
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
            u, v = (torch.zeros(z.shape, dtype=driver.dtype, device=z.device) for z in (x, y))
            block = Block(y, slice(0, len(cols.lengths)), slice(0, len(rows.lengths)))
            for tile in tiles(block.rows, block.cols, driver.side):
                factors = driver.factors(tile, block)
                s = driver.logits(tile, *factors)
                if winners:
                    driver.products(s.mul_(1 / len(y)), tile, *factors, block, u, v)

        def run() -> None:
            sweep(winners=False)
            if facts.differentiable:
                sweep(winners=True)

        return run

    def _items(self, side: str, lengths: tuple[int, ...], count: int, dtype: torch.dtype) -> tuple[Ragged, Tensor]:
        """Return items with about `count` vectors, and these."""
        of_documents = side == self.vectors.documents
        lengths = _as_long(lengths, count, count // _TOKENS_OF_A_PROGRAM if of_documents else 1)
        size, like = self.facts.embedding_size, torch.empty(0, dtype=dtype, device=self.facts.device)
        made = list(random_rows(sum(lengths), size, like, int(of_documents)).split(lengths))
        generator = torch.Generator().manual_seed(int(of_documents))
        for at in range(0, len(made), 2):
            made[at] = torch.randint(-2, 3, (lengths[at], size), generator=generator, device="cpu").to(like)
        return Ragged(Partition((len(lengths),)), lengths), torch.cat(made)


def _as_long(lengths: tuple[int, ...], vectors: int, items: int) -> tuple[int, ...]:
    """Return twice the longest of these lengths, short ones, and further ones of these.

    There are at least so many vectors and items, unless the call has fewer.
    """
    longest = max(lengths)
    found = [longest, longest, *(short for short in _SHORT if short < longest)]
    vectors, items = min(vectors, sum(lengths)), min(items, len(lengths))
    while sum(found) < vectors or len(found) < items:
        found.append(lengths[len(found) % len(lengths)])
    return tuple(found)


def tokens_in_kernels_or_not(facts: Facts, route: Route, vectors: Vectors) -> Route:
    """Return the route of late interaction, in kernels if they passed their check. Collective at a form's first call.

    Raises:
        ValueError: on every rank, for kernel="triton", if kernels failed on any of them.
    """
    longest = vectors.longest[1]
    form = (vectors.documents, str(integer_for(longest)), longest.bit_length())
    rehearsal = MaxSimRehearsal(facts, route, vectors)
    in_kernels = use_kernels(facts, form, rehearsal.layout, lambda: rehearsal)
    return replace(route, tokens_in_kernels=in_kernels)


def in_kernels_or_not(facts: Facts, plan: SigmoidPlan, layout: Layout) -> SigmoidPlan:
    """Return the plan of a sigmoid loss, in kernels if they passed their check. Collective at a form's first call."""
    if not plan.in_kernels:
        return plan
    weighted = facts.inputs.get("weights") is not None or plan.per_row
    weighted = weighted or facts.products.needs_unit(facts.features_dtype, in_kernels=True)
    bias = facts.inputs["logit_bias"]
    wants_bias = isinstance(bias, Tensor) and bias.requires_grad
    form = (*plan.pairs.kinds, weighted, wants_bias, plan.per_row)
    if use_kernels(facts, form, layout, lambda: SigmoidRehearsal(facts, plan, layout, weighted, wants_bias)):
        return plan
    return replace(plan, route=choose_route(facts.with_(kernels=False), layout, keep=False), in_kernels=False)
