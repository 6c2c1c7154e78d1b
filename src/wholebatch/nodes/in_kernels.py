"""Nodes in kernels whose positives are diagonals, or left out: what calls share, and products with tiles of dS.

The positives are no candidates, so that their terms t_i in dS are added to U and V at the end, in float32. Features
are cast once, and a further tile costs one launch and two products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..contract import Facts
from ..partition import Tile
from ..sweep import NONE, Block, Diagonals, Members, Pairs, entries_of_memory, in_memory, members, tiles_of_launches
from .route import Layout, Route
from .softmax_plan import SoftmaxPlan


@dataclass(eq=False)
class TermsOfCall:
    """The numbers of one call beside its features: 1 / |x_i| and 1 / |y_j|, which multiply S_ij, both float32."""

    rows: Tensor  # (b,)
    cols: Tensor  # (B,)
    excluded: Members | None = None  # the entries that are no candidates; None: those of the form


class TileOfS(NamedTuple):
    """A tile of S of one launch, its positives, and its excluded entries."""

    tile: Tile
    positive: kernels.Entries
    excluded: kernels.Entries


@dataclass(eq=False)
class InKernels:
    """The facts of a form that all of its calls share."""

    # sums, gradients: the tiles of S of one launch each
    sums: tuple[TileOfS, ...]
    gradients: tuple[TileOfS, ...]
    entries: int  # of the largest tile of dS, with rows that begin at multiples of 16 bytes
    pairs: int  # the number of positive pairs, of the first local rows with the first local columns
    dtype: torch.dtype  # of factors in the product S
    gradient_dtype: torch.dtype  # of dS, and of the rows that it is multiplied with
    tf32: bool  # whether float32 is multiplied in TF32

    def inputs(
        self, launch: TileOfS, x: Tensor, y: Tensor, numbers: Tensor, terms: TermsOfCall | None = None
    ) -> kernels.TileInputs:
        """Return a tile as kernels take it."""
        tile, positive, excluded = launch
        rows, cols = tile.rows, tile.cols
        row_terms = col_terms = None
        if terms is not None:
            row_terms, col_terms = kernels.RowTerms(terms.rows[rows], None), terms.cols[cols]
            excluded = excluded if terms.excluded is None else terms.excluded.of_tile(tile)
        return kernels.TileInputs(
            x[rows], y[cols], numbers, positive, excluded, 0, rows.start, row_terms, col_terms, self.tf32
        )

    def products_of(self, x: Tensor, y: Tensor, row_numbers: kernels.RowNumbers | None, dtype: torch.dtype) -> Tensor:
        """Return x_i . y_i of the positive pairs, float32, from the numbers of rows if these have its dtype."""
        if row_numbers is None or dtype != self.dtype:
            row_numbers = kernels.row_numbers(x, y, ())
        return row_numbers.products[: self.pairs]

    def products(
        self,
        route: Route,
        x: Tensor,
        y: Tensor,
        needed: tuple[bool, bool],
        write: Callable[[TileOfS, Tensor], object],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dS Y of the local rows, and dS^T X of all columns, without the pairs' terms; None where not needed.

        A function writes each tile of dS.
        """
        multiply, dtype = route.products.multiply, self.gradient_dtype
        u = x.new_empty(x.shape, dtype=torch.float32) if needed[0] else None
        v = y.new_empty(y.shape, dtype=torch.float32) if needed[1] else None
        if not self.gradients:  # this rank has no rows
            return u, None if v is None else v.zero_()
        memory = x.new_empty(self.entries, dtype=dtype)
        x_factor, y_factor = x.to(dtype) if v is not None else x, y.to(dtype) if u is not None else y
        for launch in self.gradients:
            tile = launch.tile
            grad = in_memory(memory, tile.shape)
            write(launch, grad)
            if u is not None:
                multiply((grad,), (y_factor[tile.cols],), u[tile.rows], add=tile.cols.start > 0)
            if v is not None:
                multiply((grad.T,), (x_factor[tile.rows],), v[tile.cols], add=tile.rows.start > 0)
        return u, v


def one_diagonal(facts: Facts, route: Route, pairs: Pairs, layout: Layout, dtype: torch.dtype) -> InKernels | None:
    """Return what calls of this form share; None, on all ranks, if their pairs, products or exchange are others."""
    positive, products, exchange = pairs.positive, route.products, route.exchange
    factors = products.dtype_in_kernels(dtype)
    if factors is None or factors not in kernels.READABLE or not exchange.one_transfer or pairs.excluded is not NONE:
        return None
    rank = facts.rank
    rows, cols = layout.rows.counts[rank], layout.cols.total
    count = min(rows, layout.cols.counts[rank])
    if not isinstance(positive, Diagonals) or positive.places != ((0, layout.cols.offsets[rank], count),):
        return None
    block = Block(torch.empty(0, device="meta"), slice(0, cols), slice(0, rows))
    return shared(facts, route, pairs, block, factors, count)


def named_rows(facts: Facts, plan: SoftmaxPlan, layout: Layout, dtype: torch.dtype) -> InKernels | None:
    """Return what calls of this form share; None, on all ranks, if not each column names rows, all to be normalized."""
    route, towers, pairs = plan.route, plan.towers, plan.selection.pairs
    factors, rows = route.products.dtype_in_kernels(dtype), layout.rows.counts[facts.rank]
    if towers.stay_rows is not None or towers.stay_norms is None or towers.travel_norms is None:
        return None
    # A rounded copy of X would be kept for the backward pass. Norms may be short, and gradients too long for float16.
    if factors != dtype or factors not in (torch.float32, torch.bfloat16) or not route.exchange.one_transfer:
        return None
    if pairs.positive is not NONE or members(pairs.excluded, layout.cols.total, facts.device) is None:
        return None
    block = Block(torch.empty(0, device="meta"), slice(0, layout.cols.total), slice(0, rows))
    return replace(shared(facts, route, Pairs(), block, factors, 0), gradient_dtype=factors)


def shared(facts: Facts, route: Route, pairs: Pairs, block: Block, factors: torch.dtype, count: int) -> InKernels:
    """Return what calls of a form share, with factors of a dtype in S, and so many positive pairs."""
    positive, excluded = (members(subset, block.cols.stop, facts.device) for subset in (pairs.positive, pairs.excluded))
    assert positive is not None
    assert excluded is not None
    sums, gradients = (
        tuple(TileOfS(tile, positive.of_tile(tile), excluded.of_tile(tile)) for tile in tiles)
        for tiles in tiles_of_launches(block, route.budget.side, factors)
    )
    most = max((entries_of_memory(tile.shape) for tile, *_ in gradients), default=0)
    gradient_dtype = torch.float16 if factors == torch.bfloat16 and route.products.units else factors
    return InKernels(sums, gradients, most, count, factors, gradient_dtype, route.products.allows_tf32)
