"""The softmax node for a small batch with one positive for each row, on the diagonal: a rank's part of S is one tile.

    A_i = log sum_j exp S_ij over the negatives of row i, or of column i        T_i = S_ii
    -log p_i = softplus(A_i - T_i)

No loop over tiles is needed: S is multiplied once, and E = exp(S - c) is kept for the backward pass. With R_i = sum_j
E_ij, of rows and of columns, and w = dL/dA / R,

    dL/dS_ij = E_ij (w_i + w'_j),        dL/dS_ii = dL/dT_i

The time of such a step depends on the number of operations that Python starts, not on their size. So the losses of
pairs are computed here, too, where a loss needs nothing else. Memory: E, and in the backward pass one more matrix of
its size, as the budget allows. On several ranks the messages are those of the sweep with the exchange "gather". All
ranks take this way, or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.precision import accumulation_dtype, wide_dtype
from ..comm.inside import reduce_scatter
from ..contract import Facts
from ..logsumexp import softplus
from ..sweep import NONE, Diagonals
from .route import Layout, unit_of_gradients
from .softmax_plan import SoftmaxPlan

_ROWS, _COLS = (("sum", "target"), ("sum",)), ((), ("sum",))  # fields that this node computes
_UNCHANGED = (None,) * 6
_MOST = 2048  # rows and columns of S


def is_one_tile(facts: Facts, plan: SoftmaxPlan, layout: Layout, dtype: torch.dtype) -> bool:
    """Return whether this node computes a call: the same on all ranks."""
    if plan.shift is None or plan.in_kernels or plan.rows not in _ROWS or plan.cols not in _COLS:
        return False
    form = "one tile", layout.rows.counts, layout.cols.counts, plan.symmetric, dtype, facts.differentiable
    if not facts.once(form, lambda: _may_be_one_tile(facts, plan, layout, dtype)):
        return False
    return has_plain_pairs(facts, plan, layout) and plan.bounds.exclude_underflow(plan.shift, accumulation_dtype(dtype))


def _may_be_one_tile(facts: Facts, plan: SoftmaxPlan, layout: Layout, dtype: torch.dtype) -> bool:
    """Return whether a call of this form may be one tile."""
    products = plan.route.products
    if products.parts > 1 or (products.precision == "tf32" and facts.device.type != "cuda"):  # the sweep emulates these
        return False
    if plan.symmetric or plan.dtype is not None or layout.rows.counts != layout.cols.counts:
        return False
    fits = _fits(facts, plan, layout.rows.counts, accumulation_dtype(dtype))
    return plan.route.exchange.one_transfer and fits


def _fits(facts: Facts, plan: SoftmaxPlan, counts: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether each rank's part of S is one tile, and is kept in full precision for the backward pass."""
    budget, total = plan.route.budget, sum(counts)
    if len(counts) == 1:
        return total <= min(budget.side, _MOST) and budget.kept >= total**2 and budget.kept_dtype == dtype
    return set(facts.of_ranks("memory")) == {"auto"} and max(counts) * total <= min(budget.side, _MOST) ** 2


def has_plain_pairs(facts: Facts, plan: SoftmaxPlan, layout: Layout) -> bool:
    """Return whether the logits are scaled products, the positives are the diagonal, and all others are candidates."""
    rows, selection, towers, rank = layout.rows, plan.selection, plan.towers, facts.rank
    positive = selection.pairs.positive
    changed = (selection.ceiling, selection.guide, selection.transform, selection.offsets)
    return (
        selection.over == "negatives"
        and selection.best_of == 1
        and selection.pairs.excluded is NONE
        and (*changed, plan.guide, towers.stay_norms) == _UNCHANGED
        and (towers.stays, towers.travels, towers.normalize, towers.travel_norms) == ((0,), (1,), False, None)
        and isinstance(positive, Diagonals)
        and positive.places == ((0, rows.offsets[rank], rows.counts[rank]),)
    )


class OneTile(torch.autograd.Function):
    """Compute the outputs of the rows, then A of the columns; with `plan.pairs_alone` the cross-entropies of pairs."""

    @staticmethod
    @no_autocast
    def forward(ctx: Any, plan: SoftmaxPlan, scale: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        wide, shift, exchange, products = wide_dtype(x.device), plan.shift, plan.route.exchange, plan.route.products
        own, others = products.rounded(x), products.rounded(exchange.fetch(y))
        local, size = exchange.kept_local, (x.shape[0], others.shape[0])
        logits = products.scaled(plan.scale, (own,), (others.T,), x.new_empty(size, dtype=accumulation_dtype(x.dtype)))
        target = logits.diagonal(local.start).to(wide, copy=True)  # before E overwrites it
        if shift:
            logits.sub_(shift)
            target.sub_(shift)
        exponentials = logits.exp_()
        exponentials.diagonal(local.start).zero_()
        sides = [exponentials.sum(1)]
        if plan.cols and exchange.comm.size == 1:
            sides.append(exponentials.sum(0))
        sums = torch.stack(sides).to(wide)
        if plan.cols and exchange.comm.size > 1:
            col_sums = exchange.reduce(exponentials.sum(0).to(wide)[:, None], "sum")[local, 0]
            sums = torch.cat([sums, col_sums[None]])
        ctx.plan, ctx.dtypes = plan, (x.dtype, y.dtype)
        scale = scale if isinstance(scale, Tensor) else None
        # X and Y as well, so that autograd finds the node when a gradient is differentiated again, and the node raises.
        ctx.save_for_backward(scale, own, others, exponentials, sums, target, x, y)
        if plan.pairs_alone:
            return (softplus(sums.log().sub_(target)).mean(0),)
        assert shift is not None
        row_logsumexp, *cols = sums.log().add_(shift).unbind()
        return row_logsumexp, *([target + shift] if "target" in plan.rows else []), *cols

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: SoftmaxPlan = ctx.plan
        scale, own, others, exponentials, sums, target, *_ = ctx.saved_tensors
        exchange, products, dtype = plan.route.exchange, plan.route.products, exponentials.dtype
        local = exchange.kept_local
        _, want_scale, want_x, want_y = ctx.needs_input_grad
        # N dS, so that nothing is tiny
        if plan.pairs_alone:
            weights = (grads[0] * (plan.size / sums.shape[0])).div(target.exp().add(sums))
            pair_slopes = weights.mul(sums).sum(0).neg_()
        else:
            side_grads = torch.stack([grads[0], grads[-1]] if plan.cols else [grads[0]])
            weights = torch.where(side_grads == 0, 0.0, side_grads * plan.size / sums)
            pair_slopes = plan.size * grads[1] if "target" in plan.rows else torch.zeros_like(target)
        pair_slopes, (by_row, *by_col) = pair_slopes.to(dtype), weights.to(dtype).unbind()
        if by_col:
            slope = torch.add(by_row[:, None], exchange.distribute(by_col[0][None])).mul_(exponentials)
        else:
            slope = exponentials * by_row[:, None]
        unit, apart = None, products.rounds_gradients  # pairs are the largest entries: they are not rounded
        if products.needs_unit(own.dtype, in_kernels=False):
            unit = unit_of_gradients(slope.abs().amax() if slope.numel() else slope.new_zeros(()))
            slope.div_(unit)
        if apart:
            slope = slope.to(products.gradient_dtype)
        else:
            slope.diagonal(local.start).copy_(pair_slopes)

        def product(left: Tensor, right: Tensor) -> Tensor:
            out = exponentials.new_empty(left.shape[0], right.shape[1])
            products.multiply((left,), products.beside_gradient((right,)), out)
            return out if unit is None else out.mul_(unit)

        u = product(slope, others) if want_x or (want_scale and not want_y) else None
        v = product(slope.T, own) if want_y else None
        if v is not None and exchange.comm.size > 1:
            v = reduce_scatter(exchange.comm, v, exchange.columns.counts)
        for gradient, partner in ((u, others[local]), (v, own)):
            if apart and gradient is not None:
                gradient.addcmul_(pair_slopes[:, None], partner.to(dtype))
        grad_scale = None
        if want_scale:
            features, gradient = (own, u) if v is None else (others[local], v)
            assert gradient is not None
            share = torch.linalg.vecdot(features.to(dtype), gradient).sum(dtype=sums.dtype)
            grad_scale = (share / plan.size).to(scale).view_as(scale)
        factor, gradients = plan.scale / plan.size, []
        for gradient, needed, input_dtype in ((u, want_x, ctx.dtypes[0]), (v, want_y, ctx.dtypes[1])):
            gradients.append(gradient.mul_(factor).to(input_dtype) if gradient is not None and needed else None)
        return None, grad_scale, *gradients
