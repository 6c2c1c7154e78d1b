"""The softmax node in kernels, where the positives are diagonals: the formulas of `softmax` in a few launches.

    forward     E of a tile -> sums of its rows and columns; a positive's logit is a product of two rows, in float32
    backward    weights of rows and columns -> tiles of dS -> U and V by two products each -> dX, dY and <X, U>

The positives are no candidates, so that their terms t_i in dS are added to U and V at the end, in float32. Features
are cast once, and a further tile costs one launch and two products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .._autograd import no_autocast, once_differentiable
from ..comm.inside import all_reduce, reduce_scatter
from ..contract import Facts
from ..logsumexp import log_sum_exp
from ..partition import Tile
from ..sweep import (
    LARGEST,
    NONE,
    Block,
    Diagonals,
    members,
    relative_difference,
    tiles_of_launches,
)
from .route import Layout
from .softmax_plan import SoftmaxPlan

_Tile = tuple[Tile, kernels.Entries]
_NO_ENTRIES = kernels.Entries()
_FIELDS = ((), ("sum",), ("sum", "target"))  # of rows, and of columns, that this node computes
_UNCHANGED = (None,) * 7
_SMALLEST = 1e-300  # gradient, so that none is divided by 0


@dataclass(eq=False)
class InKernels:
    """The facts of a form that all of its calls share.

    Args:
        sums, gradients: the tiles of S of one launch each, and the positives in each.
        entries: of the largest tile of dS, with rows that begin at multiples of 16 bytes.
        pairs: the number of positive pairs, of the first local rows with the first local columns.
        dtype: of factors in the product S.
        of_gradients: of dS, and of the rows that it is multiplied with.
        tf32: whether float32 is multiplied in TF32.
    """

    sums: tuple[_Tile, ...]
    gradients: tuple[_Tile, ...]
    entries: int
    pairs: int
    dtype: torch.dtype
    of_gradients: torch.dtype
    tf32: bool

    def inputs(self, of: _Tile, x: Tensor, y: Tensor, numbers: Tensor) -> kernels.TileInputs:
        """Return a tile as kernels take it."""
        tile, positive = of
        rows, cols = tile.rows, tile.cols
        return kernels.TileInputs(
            x[rows], y[cols], numbers, positive, _NO_ENTRIES, 0, rows.start, allows_tf32=self.tf32
        )


def in_kernels(facts: Facts, plan: SoftmaxPlan, layout: Layout, dtype: torch.dtype) -> InKernels | None:
    """Return the facts of this node if it computes calls of this form, else None: the same on all ranks.

    Args:
        facts: of a call.
        plan: of a call, which computes S otherwise.
        layout: of S.
        dtype: of the features.
    """
    of, towers, positive = plan.selection, plan.towers, plan.selection.pairs.positive
    changed = (of.floor, of.ceiling, of.guide, of.transform, of.offsets, towers.stay_norms, towers.travel_norms)
    if changed != _UNCHANGED or of.over != "negatives" or of.best_of > 1 or of.pairs.excluded is not NONE:
        return None
    if plan.symmetric or plan.guide is not None or towers.normalize or len(towers.stays) + len(towers.travels) != 2:
        return None
    if plan.rows not in _FIELDS or plan.cols not in _FIELDS or plan.dtype is not None:
        return None
    products, exchange = plan.route.products, plan.route.exchange
    factors = products.dtype_in_kernels(dtype)
    if factors is None or factors not in kernels.READABLE or not exchange.one_transfer:
        return None
    rank, device = facts.rank, facts.device
    rows, cols = layout.rows.counts[rank], layout.cols.total
    pairs = min(rows, layout.cols.counts[rank])
    if not isinstance(positive, Diagonals) or positive.places != ((0, layout.cols.offsets[rank], pairs),):
        return None
    named = members(positive, cols, device)
    assert named is not None
    of_gradients = torch.float16 if factors == torch.bfloat16 and products.units else factors
    block = Block(torch.empty(0, device="meta"), slice(0, cols), slice(0, rows))
    tiles = [
        tuple((tile, named.of_tile(tile)) for tile in of)
        for of in tiles_of_launches(block, plan.route.budget.side, factors)
    ]
    most = max((tile.shape[0] * columns_of_memory(tile.shape[1]) for tile, _ in tiles[1]), default=0)
    return InKernels(tiles[0], tiles[1], most, pairs, factors, of_gradients, products.allows_tf32)


class SoftmaxInKernels(torch.autograd.Function):
    """Compute the outputs of the rows, then those of the columns: A, and T where it is among the fields."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any,
        plan: SoftmaxPlan,
        form: InKernels,
        of_rows: kernels.RowNumbers | None,
        scale: Any,
        x: Tensor,
        y: Tensor,
    ) -> tuple[Tensor, ...]:
        exchange = plan.route.exchange
        assert plan.shift is not None
        shift = kernels.exact(plan.shift)
        numbers = kernels.numbers_of(plan.scale, shift, x.device)
        read, local = x.to(form.dtype), y.to(form.dtype)
        fetched = exchange.fetch(local)
        row_sums, col_sums = _sums(plan, form, read, fetched, numbers)
        if plan.canaries is not None and row_sums is not None and col_sums is not None:
            entries = row_sums.shape[0] * col_sums.shape[0]
            plan.canaries.note_sums(relative_difference(row_sums.sum(), col_sums.sum(), entries))
        if col_sums is not None and exchange.comm.size > 1:
            col_sums = exchange.reduce(col_sums[:, None], "sum")[exchange.kept_local, 0].clone()
        if of_rows is None or x.dtype != form.dtype:
            of_rows = kernels.row_numbers(read, local, ())
        target = of_rows.products[: form.pairs].double().mul_(plan.scale)
        ctx.plan, ctx.form, ctx.dtypes = plan, form, (x.dtype, y.dtype)
        scale = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(scale, read, local, fetched, numbers, row_sums, col_sums)
        outputs = [
            target if name == "target" else log_sum_exp(shift, sums)
            for names, sums in ((plan.rows, row_sums), (plan.cols, col_sums))
            for name in names
            if sums is not None
        ]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan, form = ctx.plan, ctx.form
        scale, x, y, fetched, numbers, row_sums, col_sums = ctx.saved_tensors
        exchange = plan.route.exchange
        want_scale, want_x, want_y = ctx.needs_input_grad[3:]
        row_grads, col_grads = grads[: len(plan.rows)], grads[len(plan.rows) :]
        weights = _weights(plan, form, (row_grads, row_sums), (col_grads, col_sums))
        u, v = _products(plan, form, (x, fetched, numbers), weights, (want_x or (want_scale and not want_y), want_y))
        if v is not None and exchange.comm.size > 1:
            v = reduce_scatter(exchange.comm, v, exchange.columns.counts)
        if plan.canaries is not None and u is not None and v is not None:
            plan.canaries.note_products((x, u, None), (y, v, None))
        term = next((side[1] for side in (row_grads, col_grads) if len(side) > 1), None)
        found: list[Tensor | None] = []
        shares = None
        for product, own, other, wanted, dtype in ((u, x, y, want_x, ctx.dtypes[0]), (v, y, x, want_y, ctx.dtypes[1])):
            made = None
            if product is not None:
                pairs = None if term is None else (other, term, plan.size)
                made, shares = kernels.row_gradient(
                    product, own, pairs, None, weights.unit, plan.scale / plan.size, dtype
                )
            found.append(made if wanted else None)
        grad_scale = None
        if want_scale and shares is not None:
            grad_scale = (shares.sum() / plan.size).to(scale).view_as(scale)
        return None, None, None, grad_scale, *found


def _sums(
    plan: SoftmaxPlan, form: InKernels, x: Tensor, y: Tensor, numbers: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums of exponentials of the local rows, and of all columns over these rows."""
    made: list[Tensor | None] = [None, None]
    for of in form.sums:
        tile = of[0]
        found = kernels.tile_sums(form.inputs(of, x, y, numbers), rows=plan.rows[:1], cols=plan.cols[:1])
        for side, at, total in ((0, tile.rows, x.shape[0]), (1, tile.cols, y.shape[0])):
            new, sums = found[side].get("sum"), made[side]
            if new is None:
                continue
            if sums is None and new.shape[0] == total:
                made[side] = new
                continue
            made[side] = sums = new.new_zeros(total) if sums is None else sums
            sums[at] += new
    if not form.sums:  # this rank has no rows
        nothing = x.new_zeros(y.shape[0], dtype=torch.float64)
        return nothing[:0] if plan.rows else None, nothing if plan.cols else None
    return made[0], made[1]


@dataclass(eq=False)
class _Weights:
    """Weights of E in dS: of local rows, of all columns, and the number by which they are divided, if they are."""

    rows: Tensor | None
    cols: Tensor | None
    unit: Tensor | None


def _weights(
    plan: SoftmaxPlan,
    form: InKernels,
    of_rows: tuple[Sequence[Tensor], Tensor | None],
    of_cols: tuple[Sequence[Tensor], Tensor | None],
) -> _Weights:
    """Return the weights from the derivatives and the sums of both sides; those of columns travel to all ranks."""
    sides = [None if sums is None else (grads[0], sums) for grads, sums in (of_rows, of_cols)]
    rows, cols, largest = kernels.side_weights(sides[0], sides[1], plan.size)
    exchange, unit = plan.route.exchange, None
    if form.of_gradients == torch.float16:
        unit = all_reduce(exchange.comm, largest.sum(), "max").clamp_(min=_SMALLEST).mul_(1 / LARGEST).float()
        rows, cols = (None if weights is None else weights.div_(unit) for weights in (rows, cols))
    if cols is not None:
        cols = exchange.distribute(cols[None])[0]
    return _Weights(rows, cols, unit)


def _products(
    plan: SoftmaxPlan,
    form: InKernels,
    data: tuple[Tensor, Tensor, Tensor],
    weights: _Weights,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return dS Y of the local rows, and dS^T X of all columns, without the pairs' terms; None where not needed."""
    x, y, numbers = data
    multiply, dtype = plan.route.products.multiply, form.of_gradients
    u = x.new_empty(x.shape, dtype=torch.float32) if needed[0] else None
    v = y.new_empty(y.shape, dtype=torch.float32) if needed[1] else None
    if not form.gradients:
        return u, None if v is None else v.zero_()
    by_row, by_col = (None if of is None else {"sum": of} for of in (weights.rows, weights.cols))
    memory = x.new_empty(form.entries, dtype=dtype)
    x_factor, y_factor = x.to(dtype) if v is not None else x, y.to(dtype) if u is not None else y
    for of in form.gradients:
        tile = of[0]
        (rows, cols), wide = tile.shape, columns_of_memory(tile.shape[1])
        grad = memory[: rows * wide].view(rows, wide)[:, :cols]
        kernels.tile_gradient(
            form.inputs(of, x, y, numbers),
            grad,
            rows={} if by_row is None else {"sum": by_row["sum"][tile.rows]},
            cols={} if by_col is None else {"sum": by_col["sum"][tile.cols]},
        )
        if u is not None:
            multiply((grad,), (y_factor[tile.cols],), u[tile.rows], add=tile.cols.start > 0)
        if v is not None:
            multiply((grad.T,), (x_factor[tile.rows],), v[tile.cols], add=tile.rows.start > 0)
    return u, v


def columns_of_memory(cols: int) -> int:
    """Return the columns of memory of a tile, whose rows begin at multiples of 16 bytes."""
    return -(-cols // 8) * 8
