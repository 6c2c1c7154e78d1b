"""The softmax node in kernels for two normalized views on one process: S = scale Z Z^T without its diagonal.

    Z = [z0; z1], each row divided by its norm; a row's positive is the row of the other view

Kernels multiply rows as they are, and S_ij by 1 / (|x_i| |x_j|). Tiles on and above the diagonal suffice: with weights
w of rows, G = dS + dS^T has the entries E_ij (w_i + w_j), and t_i + t_j for a positive pair. A launch writes
G_ij / (|x_i| |x_j|), so a product with X is U_i / |x_i|, as `kernels.row_gradient` takes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .._base.autograd import no_autocast, once_differentiable
from .._base.normalize import EPS
from ..contract import Facts
from ..logsumexp import log_sum_exp
from ..sweep import Block, Diagonals, in_memory
from .in_kernels import InKernels, TermsOfCall, shared
from .route import Layout
from .softmax_plan import SoftmaxPlan


def two_views_in_kernels(facts: Facts, plan: SoftmaxPlan, layout: Layout, dtype: torch.dtype) -> InKernels | None:
    """Return the facts of this node if it computes calls of this form, else None; as `in_kernels`."""
    selection, towers, pairs = plan.selection, plan.towers, plan.selection.pairs
    changed = (selection.ceiling, selection.guide, selection.transform, selection.offsets)
    if facts.comm.size > 1 or not plan.symmetric or plan.cols != ("sum", "target") or changed != (None,) * 4:
        return None
    if selection.over != "negatives" or (towers.stays, towers.travels, towers.normalize) != ((0, 1), (), True):
        return None
    products, rows = plan.route.products, layout.rows.total
    factors, b = products.dtype_in_kernels(dtype), rows // 2
    if plan.dtype is not None or factors not in (torch.float32, torch.bfloat16):
        return None
    if not isinstance(pairs.positive, Diagonals) or pairs.positive.places != ((0, b, b), (b, 0, b)):
        return None
    if not isinstance(pairs.excluded, Diagonals) or pairs.excluded.places != ((0, 0, rows),):
        return None
    block = Block(torch.empty(0, device="meta"), slice(0, rows), slice(0, rows), triangle=True)
    return shared(facts, plan.route, pairs, block, factors, b)


class TwoViewsInKernels(torch.autograd.Function):
    """Compute A and T of all rows of Z, or the mean cross-entropy of both views of each example."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any,
        plan: SoftmaxPlan,
        form: InKernels,
        row_numbers: kernels.RowNumbers | None,
        scale: Any,
        z0: Tensor,
        z1: Tensor,
    ) -> tuple[Tensor, ...]:
        assert plan.shift is not None
        shift, b = kernels.exact(plan.shift), z0.shape[0]
        numbers = kernels.numbers_of(plan.scale, shift, z0.device)
        row_numbers = kernels.row_numbers(z0, z1, ()) if row_numbers is None else row_numbers
        inverse = row_numbers.norms.clamp(min=EPS).reciprocal_()
        terms = TermsOfCall(inverse, inverse)
        x = torch.cat([z0, z1]).to(form.dtype)
        sums: Tensor | None = None
        for launch in form.sums:
            tile = launch.tile
            names = () if tile.self_transposed else ("sum",)
            by_row, by_col = kernels.tile_sums(form.inputs(launch, x, x, numbers, terms), rows=("sum",), cols=names)
            if sums is None and tile.shape[0] == x.shape[0]:
                sums = by_row["sum"]
                continue
            sums = by_row["sum"].new_zeros(x.shape[0]) if sums is None else sums
            sums[tile.rows].add_(by_row["sum"])
            if names:
                sums[tile.cols].add_(by_col["sum"])
        assert sums is not None
        pair_factors = inverse[:b] * inverse[b:]
        cosines = row_numbers.products * pair_factors
        ctx.plan, ctx.form = plan, form
        scale = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(scale, z0, z1, x, numbers, row_numbers.norms, inverse, pair_factors, cosines, sums)
        if plan.pairs_alone:
            return (kernels.pair_losses(sums[:b], sums[b:], cosines, numbers),)
        target = cosines.double().mul_(plan.scale)
        return log_sum_exp(shift, sums), torch.cat([target, target])

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan, form = ctx.plan, ctx.form
        scale, z0, z1, x, numbers, norms, inverse, pair_factors, cosines, sums = ctx.saved_tensors
        want_scale, *needed = ctx.needs_input_grad[3:]
        b, size = z0.shape[0], float(plan.size)
        weights: Tensor | None
        if plan.pairs_alone:
            first, second, terms, _ = kernels.pair_weights(grads[0], sums[:b], sums[b:], cosines, numbers, size)
            assert second is not None
            weights, term_factor = torch.cat([first, second]), 1.0
        else:
            weights, term_factor = kernels.side_weights(None, (grads[0], sums), size)[1], size
            terms = grads[1][:b] + grads[1][b:]
        assert weights is not None
        multiply, memory = plan.route.products.multiply, x.new_empty(form.entries)
        u, call_terms = x.new_empty(x.shape, dtype=torch.float32), TermsOfCall(inverse, inverse)
        for launch in form.gradients:
            tile = launch.tile
            rows, cols, slope = tile.rows, tile.cols, in_memory(memory, tile.shape)
            kernels.tile_gradient(
                form.inputs(launch, x, x, numbers, call_terms),
                slope,
                rows={"sum": weights[rows]},
                cols={"sum": weights[cols]},
            )
            first = rows.start == 0  # strips of rows: those below have been added to as columns
            multiply((slope,), (x[cols],), u[rows], add=not (first and tile.self_transposed))
            if not tile.self_transposed:
                multiply((slope.T,), (x[rows],), u[cols], add=not first)
        terms.mul_(pair_factors)
        factor, gradients, shares = plan.factor, [], []
        for own, other, view, want in ((z0, z1, slice(0, b), needed[0]), (z1, z0, slice(b, 2 * b), needed[1])):
            pairs = other, terms, term_factor
            gradient, share = kernels.row_gradient(
                u[view], own, pairs, norms[view], None, factor, own.dtype, divided=True
            )
            gradients.append(gradient if want else None)
            shares.append(share)
        grad_scale = (torch.cat(shares).sum() / (2 * plan.size)).to(scale).view_as(scale) if want_scale else None
        return None, None, None, grad_scale, *gradients
