"""The cross-entropy of pairs, one positive for each row, on the diagonal: for a small batch in one node.

    -log p_i = softplus(A_i - T_i)        A over the negatives of row i, or of column i, T_i = S_ii

A rank's part of S is one tile then, and no loop over tiles is needed: S is multiplied once, and E = exp(S - c) is kept
for the backward pass. With R_i = sum_j E_ij and D_i = R_i + exp(T_i - c), of rows and of columns,

    dL/dS_ij = E_ij (g_i / D_i + g_j / D'_j),        dL/dS_ii = -(g_i R_i / D_i + g_i R'_i / D'_i)

The time of such a step depends on the number of operations that Python starts, not on their size. Memory: E, and in the
backward pass one more matrix of its size, as the budget allows. On several ranks the messages are those of the sweep
with the exchange "gather". All ranks take this way, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.precision import accumulation_dtype, wide_dtype
from ..comm import LocalCommunicator
from ..comm.facts_by_rank import FactsByRank
from ..comm.inside import reduce_scatter
from ..contract import Facts
from ..partition import Diagonal, Partition
from ..sweep import NONE, Diagonals, Pairs, Selection
from .cross_entropy import one_positive, softplus
from .kernel_check import random_rows
from .rehearsals import moderate_scale
from .route import Layout, unit_of_gradients
from .row_statistics import Operands, Planned, Scale
from .shifts import never_underflows
from .softmax_plan import Bounds, SoftmaxPlan

_ROWS, _COLS = ("sum", "target"), ("sum",)
_UNCHANGED = (None,) * 6
_MOST = 2048  # rows and columns of S
_UNIT = 1.1  # bound of the products of unit rows that are rounded


def pair_losses(
    facts: Facts, scale: Scale, operands: Operands, selection: Selection, bounds: Bounds, *, both: bool
) -> Tensor:
    """Return the cross-entropy of each local row's pair, (b,), in float64. Collective, as `row_statistics`.

    With `both` it is the mean of a pair's cross-entropies in its row and in its column.
    """
    cols = _COLS if both else ()
    return _losses(Planned(facts, scale, operands, selection, bounds, _ROWS, cols, timed=_step))


def view_losses(facts: Facts, scale: Scale, operands: Operands, selection: Selection, bounds: Bounds) -> Tensor:
    """Return the mean cross-entropy of both views of each local example, (b,), in float64. Collective, likewise."""
    call = Planned(facts, scale, operands, selection, bounds, _ROWS, ())
    if (losses := call.losses_in_kernels()) is not None:
        return losses
    side, _ = call.statistics()
    assert side is not None
    assert side.target is not None
    return one_positive(side, side.target).unflatten(0, (2, -1)).mean(0)


def _losses(call: Planned) -> Tensor:
    """Return the cross-entropy of each local row's pair, (b,). Collective."""
    if _computes(call):
        return OneTile.apply(call.plan, call.scale[1], *call.operands.features)
    if (losses := call.losses_in_kernels()) is not None:
        return losses
    of_rows, of_cols = call.statistics()
    assert of_rows is not None
    assert of_rows.target is not None
    losses = one_positive(of_rows, of_rows.target)
    return losses if of_cols is None else (losses + one_positive(of_cols, of_rows.target)) / 2


def _step(call: Planned, rows: int, in_kernels: bool) -> Callable[[], None] | None:
    """Return a function that computes the losses of random pairs, forward and backward, on this process alone.

    None: the call has other pairs.
    """
    if not _is_plain(call):
        return None
    facts, scale_input, like = call.facts, call.scale[1], call.operands
    pairs, size = Partition((rows,)), facts.embedding_size
    number = moderate_scale(size)
    alone = facts.with_(
        comm=LocalCommunicator(), by_rank=FactsByRank([{"memory": facts.options.memory}]), kernels=in_kernels,
        plans={}, of_rows=None, deferred=None, assumption=None,
    )  # fmt: skip
    learned = isinstance(scale_input, Tensor) and scale_input.requires_grad
    scale = number, torch.full_like(scale_input, number).requires_grad_() if learned else number
    features = [
        random_rows(rows, size, feature[:0].detach(), seed).requires_grad_(feature.requires_grad)
        for seed, feature in enumerate(like.features)
    ]
    operands = replace(like, features=features, layout=Layout(pairs, pairs))
    selection = Selection(Pairs(Diagonals(Diagonal(0, 0, rows))))

    def run() -> None:
        losses = _losses(Planned(alone, scale, operands, selection, Bounds(_UNIT), *call.fields, rehearses=True))
        if losses.requires_grad:
            losses.mean().backward()

    return run


def _computes(call: Planned) -> bool:
    """Return whether the node below computes S: the same on all ranks."""
    facts, plan, layout = call.facts, call.plan, call.operands.layout
    if plan.shift is None or plan.in_kernels:
        return False
    form = "one tile", layout.rows.counts, layout.cols.counts, plan.symmetric, call.dtype, facts.differentiable
    if not facts.once(form, lambda: _may_be_one_tile(call)):
        return False
    if not _is_plain(call):
        return False
    return never_underflows(plan.bounds, plan.shift, accumulation_dtype(call.dtype))


def _may_be_one_tile(call: Planned) -> bool:
    """Return whether a call of this form may be one tile."""
    facts, plan, layout = call.facts, call.plan, call.operands.layout
    products = plan.route.products
    if products.parts > 1 or (products.precision == "tf32" and facts.device.type != "cuda"):  # the sweep emulates these
        return False
    if plan.symmetric or plan.dtype is not None or layout.rows.counts != layout.cols.counts:
        return False
    fits = _fits(facts, plan, layout.rows.counts, accumulation_dtype(call.dtype))
    return plan.route.exchange.one_transfer and fits


def _fits(facts: Facts, plan: SoftmaxPlan, counts: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether each rank's part of S is one tile, and is kept in full precision for the backward pass."""
    budget, total = plan.route.budget, sum(counts)
    if len(counts) == 1:
        return total <= min(budget.side, _MOST) and budget.kept >= total**2 and budget.kept_dtype == dtype
    return set(facts.of_ranks("memory")) == {"auto"} and max(counts) * total <= min(budget.side, _MOST) ** 2


def _is_plain(call: Planned) -> bool:
    """Return whether the logits are scaled products, the positives are the diagonal, and all others are candidates."""
    rows, selection, towers = call.operands.layout.rows, call.plan.selection, call.operands.towers
    positive, rank = selection.pairs.positive, call.facts.rank
    changed = (selection.ceiling, selection.guide, selection.transform, selection.offsets)
    return (
        selection.over == "negatives"
        and selection.best_of == 1
        and selection.pairs.excluded is NONE
        and (*changed, call.plan.guide, towers.stay_norms) == _UNCHANGED
        and (towers.stays, towers.travels, towers.normalize, towers.travel_norms) == ((0,), (1,), False, None)
        and isinstance(positive, Diagonals)
        and positive.places == ((0, rows.offsets[rank], rows.counts[rank]),)
    )


class OneTile(torch.autograd.Function):
    """Compute the cross-entropies of the local pairs, (b,), from X and Y."""

    @staticmethod
    @no_autocast
    def forward(ctx: Any, plan: SoftmaxPlan, scale: Any, x: Tensor, y: Tensor) -> Tensor:
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
            of_cols = exchange.reduce(exponentials.sum(0).to(wide)[:, None], "sum")[local, 0]
            sums = torch.cat([sums, of_cols[None]])
        ctx.plan, ctx.dtypes = plan, (x.dtype, y.dtype)
        scale = scale if isinstance(scale, Tensor) else None
        # X and Y as well, so that autograd finds the node when a gradient is differentiated again, and the node raises.
        ctx.save_for_backward(scale, own, others, exponentials, sums, target, x, y)
        return softplus(sums.log().sub_(target)).mean(0)

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        plan: SoftmaxPlan = ctx.plan
        scale, own, others, exponentials, sums, target, *_ = ctx.saved_tensors
        exchange, products, dtype = plan.route.exchange, plan.route.products, exponentials.dtype
        local = exchange.kept_local
        _, want_scale, want_x, want_y = ctx.needs_input_grad
        # N dS, so that nothing is tiny
        weights = (grad * (plan.size / sums.shape[0])).div(target.exp().add(sums))
        of_pairs = weights.mul(sums).sum(0).neg_().to(dtype)
        by_row, *by_col = weights.to(dtype).unbind()
        if by_col:
            slope = torch.add(by_row[:, None], exchange.distribute(by_col[0][None])).mul_(exponentials)
        else:
            slope = exponentials * by_row[:, None]
        unit, apart = None, products.rounds_gradients  # pairs are the largest entries: they are not rounded
        if products.needs_unit(own.dtype, in_kernels=False):
            unit = unit_of_gradients(slope.abs().amax() if slope.numel() else slope.new_zeros(()))
            slope.div_(unit)
        if apart:
            slope = slope.to(products.of_gradients)
        else:
            slope.diagonal(local.start).copy_(of_pairs)

        def product(left: Tensor, right: Tensor) -> Tensor:
            out = exponentials.new_empty(left.shape[0], right.shape[1])
            products.multiply((left,), products.beside_gradient((right,)), out)
            return out if unit is None else out.mul_(unit)

        u = product(slope, others) if want_x or (want_scale and not want_y) else None
        v = product(slope.T, own) if want_y else None
        if v is not None and exchange.comm.size > 1:
            v = reduce_scatter(exchange.comm, v, exchange.columns.counts)
        for gradient, of_pair in ((u, others[local]), (v, own)):
            if apart and gradient is not None:
                gradient.addcmul_(of_pairs[:, None], of_pair.to(dtype))
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
