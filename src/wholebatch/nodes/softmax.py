"""The softmax node: statistics of each row and each column of S from the features, and the gradients back.

    A_i = logsumexp_j S_ij over row i's candidates,   T_i = sum_j S_ij over its positives,   and likewise for columns

Losses are computed from these vectors in plain PyTorch; S itself is never stored. A rank computes all of a local row's
statistics. Of a column's statistics it computes a part, and the exchange adds the parts of all ranks.

Backward, `sweep.softmax` defines dS. N is the size of the batch; the factor N keeps numbers near 1 where the loss is a
mean, and is divided out at the end. With U = N dS Y and V = N dS^T X,

    d/dX     = scale / N U
    d/dY     = scale / N V, summed over the ranks
    d/dscale = 1 / N sum_ij N dS_ij x_i . y_j = 1 / N <X, U> = 1 / N <Y, V>, to be summed over the ranks
    d/doffset_i = 1 / N sum_j N dS_ij, where rows have offsets

A symmetric S has X = Y = Z. Then G = N (dS + dS^T) Z replaces U + V, and <Z, G> is 2 N d/dscale. The node receives the
derivatives of the loss by the statistics of local rows and columns, and returns its derivatives by the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.normalize import divisors
from .._base.precision import accumulation_dtype, inner
from ..comm.inside import all_reduce
from ..exchange import ColumnData, zeros
from ..logsumexp import log_sum_exp
from ..sweep import Block, Sums, Weights
from .route import unit_of_gradients
from .shifts import sums_of_sides
from .softmax_plan import Data, SoftmaxPlan

_DIFFERENTIABLE = ("logsumexp", "target", "logits")  # the outputs of a row that have a gradient: A, T and M


class Softmax(torch.autograd.Function):
    """Compute the outputs of the rows, then the outputs of the columns, each in the order of `output_names`."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any, plan: SoftmaxPlan, anchor: Tensor, scale: Any, offsets: Any, *features: Tensor
    ) -> tuple[Tensor, ...]:
        x, y, norms = plan.towers.join([z if plan.dtype is None else z.to(plan.dtype) for z in features])
        unrounded = None  # the rows before they are rounded, where the norms' gradient needs them
        if plan.rounds_joined:
            rounded = plan.route.products.rounded(x)
            unrounded = None if rounded is x or norms is None else x
            x, y = rounded, rounded if y is x else plan.route.products.rounded(y)
        travels = y if plan.guide is None else torch.cat([y.to(plan.guide.dtype), plan.guide], dim=1)
        col_norms = plan.towers.travel_norms
        if plan.towers.normalize_per_tile and norms is not None:
            col_norms = plan.route.exchange.for_all_columns(norms)
        data = Data.of(plan, x, plan.route.exchange.fetch(travels), norms, col_norms)
        rows, cols, kept = sums_of_sides(plan, data)

        ctx.plan, ctx.shifts = plan, [None if isinstance(side.shift, Tensor) else side.shift for side in (rows, cols)]
        ctx.offsets_dtype = None if offsets is None else offsets.dtype
        ctx.features = [(len(feature), feature.dtype) for feature in features]
        shifts = [side.shift if isinstance(side.shift, Tensor) else None for side in (rows, cols)]
        sums = [side.fields.get("sum") for side in (rows, cols)]
        scale = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(anchor, scale, x, y, unrounded, norms, data.fetched, col_norms, kept, *sums, *shifts)
        outputs = [_outputs(side) for side in (rows, cols)]
        constant = [x for side in outputs for name, x in side.items() if name not in _DIFFERENTIABLE]
        ctx.mark_non_differentiable(*constant)
        return tuple(x for side in outputs for x in side.values())

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: SoftmaxPlan = ctx.plan
        _, scale, x, y, unrounded, norms, fetched, col_norms, kept, row_sums, col_sums, row_shifts, col_shifts = (
            ctx.saved_tensors
        )
        _, _, want_scale, want_offsets, *want_features = ctx.needs_input_grad
        want_x, want_y = plan.towers.needed(want_features)
        if want_scale and not want_x and not want_y:
            want_y = plan.symmetric or norms is not None
            want_x = not want_y
        u = v = offset_grads = None
        divided = False
        data = Data.of(plan, x, fetched, norms, col_norms)
        if want_offsets:
            offset_grads = torch.zeros(data.count, dtype=accumulation_dtype(x.dtype), device=x.device)
        if want_x or want_y or want_offsets:
            if (unit := _unit(plan, x.dtype, grads)) is not None:
                grads = tuple(grad / unit for grad in grads)
            row_grads, col_grads = grads[: len(output_names(plan.rows))], grads[len(output_names(plan.rows)) :]
            rows = _weights(plan, plan.rows, row_grads, row_sums, ctx.shifts[0] if row_shifts is None else row_shifts)
            cols = _weights(plan, plan.cols, col_grads, col_sums, ctx.shifts[1] if col_shifts is None else col_shifts)
            u, v, divided = _products(plan, data, kept, (rows, cols), (want_x, want_y), offset_grads)
            if plan.canaries is not None and u is not None and v is not None and data.index is None:
                y_divisors = divisors(norms) if plan.towers.normalize_per_tile and norms is not None else data.col_norms
                plan.canaries.note_products((x, u, None if divided else data.norms), (y, v, y_divisors))
            if unit is not None:
                u, v, offset_grads = (None if grad is None else grad.mul_(unit) for grad in (u, v, offset_grads))

        grad_scale = None
        if want_scale:
            divided_by = divisors(norms) if plan.towers.normalize_per_tile and norms is not None else None
            share = (
                inner(y, v, divided_by)
                if v is not None
                else inner(x if data.index is None else x.index_select(0, data.index), u)
            )
            grad_scale = (share / (plan.size * (2 if plan.symmetric else 1))).to(scale).view_as(scale)
        if offset_grads is not None:
            offset_grads = offset_grads.div_(plan.size).to(ctx.offsets_dtype)
        features = [(want, *feature) for want, feature in zip(want_features, ctx.features, strict=True)]
        joined = (x, y) if unrounded is None else (unrounded, unrounded)
        feature_grads = plan.towers.split(
            (u, v), joined, norms, features,
            factor=plan.scale / plan.size, in_kernels=plan.in_kernels, divided=divided,
        )  # fmt: skip
        return None, None, grad_scale, offset_grads, *feature_grads


def _unit(plan: SoftmaxPlan, dtype: torch.dtype, grads: Sequence[Tensor]) -> Tensor | None:
    """Return a number, (), the same on all ranks, such that dS / unit fits into float16; None for other dtypes.

    |dS_ij| is at most the sum of the gradients of row i and column j. A loss scaler may have made these large.
    """
    if not plan.route.products.needs_unit(dtype, in_kernels=plan.in_kernels):
        return None
    largest = torch.stack([grad.abs().amax() if len(grad) else grad.new_zeros(()) for grad in grads]).sum()
    largest = largest * (plan.size * (2 if plan.symmetric else 1))
    return unit_of_gradients(all_reduce(plan.route.comm, largest, "max"))


@cache
def output_names(fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the node's outputs for a side, from its fields."""
    names = {"sum": "logsumexp", "squares": "effective"}
    return tuple(names.get(name, name) for name in fields if name != "negatives")


def _outputs(side: Sums) -> dict[str, Tensor]:
    """Return the outputs of a side, from its fields."""
    outputs = {}
    for name, field in side.fields.items():
        if name == "sum":
            outputs["logsumexp"] = log_sum_exp(side.shift, field)
        elif name == "squares":
            outputs["effective"] = torch.where(field > 0, side.fields["negatives"].square() / field, 0.0)
        elif name != "negatives":
            outputs[name] = field.clone()
    return outputs


def _weights(
    plan: SoftmaxPlan,
    fields: tuple[str, ...],
    grads: Sequence[Tensor],
    sums: Tensor | None,
    shift: Tensor | float,
) -> Weights | None:
    """Return the derivatives by a side's statistics, times N, in the form that a sweep takes."""
    if sums is None:
        return None
    scaled = {name: plan.size * grad for name, grad in zip(output_names(fields), grads, strict=True)}
    per_exponential = torch.where(scaled["logsumexp"] == 0, 0.0, scaled["logsumexp"] / sums)
    return Weights(shift, per_exponential, scaled.get("target"), scaled.get("logits"))


def _products(
    plan: SoftmaxPlan,
    data: Data,
    kept: Tensor | None,
    sides: tuple[Weights | None, Weights | None],
    needed: tuple[bool, bool],
    offset_grads: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return U, V reduced to the owners of its rows, and whether U is left divided by norms.

    The offsets' gradient, times N, is added to `offset_grads`.

    For a symmetric S, U is None, and V is the sum G of both.
    """
    (rows, cols), (want_x, want_y) = sides, needed
    x, dtype = data.x, accumulation_dtype(data.x.dtype)
    u = x.new_zeros(data.count, x.shape[1], dtype=dtype) if want_x else None
    sweep = plan.sweep(data, kept)
    if plan.symmetric:
        rows = cols
    carried = None if cols is None else plan.route.exchange.distribute(cols.stacked())

    def visit(block: Block, columns: ColumnData) -> None:
        block_cols = None if cols is None or columns.carried is None else cols.unstacked(columns.carried)
        products = (columns.local if plan.symmetric else u), columns.accumulated
        sweep.gradients(block, rows, block_cols, *products, offset_grads=offset_grads)

    initial = zeros(x, x.shape[1], dtype) if want_y else None
    v = plan.route.exchange.accumulate(data.fetched, visit, carried=carried, initial=initial, to_owner=True)
    return u, v, sweep.divided
