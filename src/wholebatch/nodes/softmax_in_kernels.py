"""The softmax node in kernels, where positives are diagonals or left out: the formulas of `softmax` in a few launches.

forward     E of a tile -> sums of its rows and columns; a positive's logit is a product of two rows, in float32
backward    weights of rows and columns -> tiles of dS -> U and V by two products each -> dX, dY and <X, U>

The positives are no candidates: their terms join U and V at the end. Or each column names the rows that it leaves out,
and rows are divided by norms: a launch then writes dS_ij / (|x_i| |y_j|), and the products are U_i / |x_i| and
V_j / |y_j|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .._base.autograd import no_autocast, once_differentiable
from .._base.normalize import divisors
from ..comm.inside import all_reduce, reduce_scatter
from ..contract import Facts
from ..logsumexp import log_sum_exp
from ..sweep import NamedRows, members, relative_difference
from .in_kernels import InKernels, TermsOfCall, TileOfS, named_rows, one_diagonal
from .route import Layout, unit_of_gradients
from .softmax_plan import SoftmaxPlan

_FIELDS = ((), ("sum",), ("sum", "target"))  # of rows, and of columns, that this node computes


def in_kernels(facts: Facts, plan: SoftmaxPlan, layout: Layout, dtype: torch.dtype) -> InKernels | None:
    """Return what calls of this form share if this node computes them, else None: the same on all ranks."""
    selection, towers = plan.selection, plan.towers
    changed = (selection.ceiling, selection.guide, selection.transform, selection.offsets)
    if changed != (None,) * 4 or selection.over != "negatives":
        return None
    if plan.symmetric or plan.guide is not None or towers.normalize or len(towers.stays) + len(towers.travels) != 2:
        return None
    if plan.rows not in _FIELDS or plan.cols not in _FIELDS or selection.best_of > 1:
        return None
    if isinstance(selection.pairs.excluded, NamedRows):
        return named_rows(facts, plan, layout, dtype)
    if towers.stay_norms is not None or towers.travel_norms is not None:
        return None
    return one_diagonal(facts, plan.route, selection.pairs, layout, dtype)


class SoftmaxInKernels(torch.autograd.Function):
    """Compute the outputs of the rows, then those of the columns: A, and T where it is among the fields."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any,
        plan: SoftmaxPlan,
        form: InKernels,
        row_numbers: kernels.RowNumbers | None,
        scale: Any,
        x: Tensor,
        y: Tensor,
    ) -> tuple[Tensor, ...]:
        exchange = plan.route.exchange
        assert plan.shift is not None
        shift = kernels.exact(plan.shift)
        numbers = kernels.numbers_of(plan.scale, shift, x.device)
        read, local = kernels.laid_out(x.to(form.dtype)), kernels.laid_out(y.to(form.dtype))
        fetched = exchange.fetch(local)
        terms = _terms(plan)
        row_sums, col_sums = _sums(plan, form, read, fetched, numbers, terms)
        if plan.canaries is not None and row_sums is not None and col_sums is not None:
            entries = row_sums.shape[0] * col_sums.shape[0]
            plan.canaries.note_sums(relative_difference(row_sums.sum(), col_sums.sum(), entries))
        if col_sums is not None and exchange.comm.size > 1:
            col_sums = exchange.reduce(col_sums[:, None], "sum")[exchange.kept_local, 0].clone()
        products = None if terms is not None else form.products_of(read, local, row_numbers, x.dtype)
        ctx.plan, ctx.form, ctx.terms, ctx.dtypes = plan, form, terms, (x.dtype, y.dtype)
        scale = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(scale, read, local, fetched, numbers, row_sums, col_sums, products)
        if plan.pairs_alone:
            assert row_sums is not None
            assert products is not None
            return (kernels.pair_losses(row_sums, col_sums, products, numbers),)
        target = None if products is None else products.double().mul_(plan.scale)
        outputs = [
            log_sum_exp(shift, sums) if name == "sum" or target is None else target.clone()
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
        scale, x, y, fetched, numbers, row_sums, col_sums, products = ctx.saved_tensors
        exchange = plan.route.exchange
        want_scale, want_x, want_y = ctx.needs_input_grad[3:]
        row_weights: Tensor | None
        term: tuple[Tensor, float] | None = None  # of the pairs' logits, and a factor of it
        if plan.pairs_alone:
            row_weights, col_weights, terms, largest = kernels.pair_weights(
                grads[0], row_sums, col_sums, products, numbers, plan.size
            )
            term = terms, 1.0
        else:
            row_grads, col_grads = grads[: len(plan.rows)], grads[len(plan.rows) :]
            rows = None if row_sums is None else (row_grads[0], row_sums)
            cols = None if col_sums is None else (col_grads[0], col_sums)
            row_weights, col_weights, largest = kernels.side_weights(rows, cols, plan.size)
            targets = [side[1] for side in (row_grads, col_grads) if len(side) > 1]  # a pair has one logit in both
            if targets:
                term = targets[0] if len(targets) == 1 else targets[0] + targets[1], plan.size
        weights = _weights_in_units(plan, form, row_weights, col_weights, largest)
        wanted = want_x or (want_scale and not want_y), want_y
        u, v = _products(plan, form, (x, fetched, numbers), weights, wanted, ctx.terms)
        if v is not None and exchange.comm.size > 1:
            v = reduce_scatter(exchange.comm, v, exchange.columns.counts)
        if plan.canaries is not None and u is not None and v is not None:
            plan.canaries.note_products((x, u, None), (y, v, None))
        gradients: list[Tensor | None] = []
        shares, factor = None, plan.factor
        towers, (dtype_x, dtype_y) = plan.towers, ctx.dtypes
        sides = (u, x, y, towers.stay_norms, want_x, dtype_x), (v, y, x, towers.travel_norms, want_y, dtype_y)
        for product, own, other, norms, needed, dtype in sides:
            gradient = None
            if product is not None:
                pairs = None if term is None else (other, *term)
                gradient, shares = kernels.row_gradient(
                    product, own, pairs, norms, weights.unit, factor, dtype, divided=norms is not None, in_place=True
                )
            gradients.append(gradient if needed else None)
        grad_scale = None
        if want_scale and shares is not None:
            grad_scale = (shares.sum() / plan.size).to(scale).view_as(scale)
        return None, None, None, grad_scale, *gradients


def _terms(plan: SoftmaxPlan) -> TermsOfCall | None:
    """Return what a call has beside its features: norms, and the rows that each column leaves out; None: nothing."""
    stay_norms, travel_norms = plan.towers.stay_norms, plan.towers.travel_norms
    if stay_norms is None or travel_norms is None:
        return None
    rows, cols = (divisors(norms)[:, 0].reciprocal() for norms in (stay_norms, travel_norms))
    return TermsOfCall(rows, cols, members(plan.selection.pairs.excluded, len(cols), cols.device))


def _sums(
    plan: SoftmaxPlan, form: InKernels, x: Tensor, y: Tensor, numbers: Tensor, terms: TermsOfCall | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums of exponentials of the local rows, and of all columns over these rows."""
    by_side: list[Tensor | None] = [None, None]
    for launch in form.sums:
        tile = launch.tile
        tile_sums = kernels.tile_sums(form.inputs(launch, x, y, numbers, terms), rows=plan.rows[:1], cols=plan.cols[:1])
        for side, part, total in ((0, tile.rows, x.shape[0]), (1, tile.cols, y.shape[0])):
            new, sums = tile_sums[side].get("sum"), by_side[side]
            if new is None:
                continue
            if sums is None and new.shape[0] == total:
                by_side[side] = new
                continue
            by_side[side] = sums = new.new_zeros(total) if sums is None else sums
            sums[part].add_(new)
    if not form.sums:  # this rank has no rows
        nothing = x.new_zeros(y.shape[0], dtype=torch.float64)
        return nothing[:0] if plan.rows else None, nothing if plan.cols else None
    return by_side[0], by_side[1]


@dataclass(eq=False)
class _Weights:
    """Weights of E in dS: of local rows, of all columns, and the number by which they are divided, if they are."""

    rows: Tensor | None
    cols: Tensor | None
    unit: Tensor | None


def _weights_in_units(
    plan: SoftmaxPlan, form: InKernels, rows: Tensor | None, cols: Tensor | None, largest: Tensor
) -> _Weights:
    """Return the weights in a unit of dS, if it is in float16; those of columns travel to all ranks."""
    exchange, unit = plan.route.exchange, None
    if form.gradient_dtype == torch.float16:
        unit = unit_of_gradients(all_reduce(exchange.comm, largest.amax(1).sum(), "max")).float()
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
    terms: TermsOfCall | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return dS Y of the local rows, and dS^T X of all columns, without the pairs' terms; None where not needed."""
    x, y, numbers = data

    def write(launch: TileOfS, grad: Tensor) -> None:
        tile = launch.tile
        kernels.tile_gradient(
            form.inputs(launch, x, y, numbers, terms),
            grad,
            rows={} if weights.rows is None else {"sum": weights.rows[tile.rows]},
            cols={} if weights.cols is None else {"sum": weights.cols[tile.cols]},
        )

    return form.products(plan.route, x, y, needed, write)
