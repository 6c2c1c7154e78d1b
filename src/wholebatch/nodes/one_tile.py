"""The softmax node for a small batch: a rank's part of S is one tile, and no loop over tiles is needed.

The formulas are those of `softmax`, with one shift for all, one positive for each row on the diagonal, and
E = exp(S - c) kept for the backward pass. The time of such a step depends on the number of operations that Python
starts, not on their size. Memory: E, and in the backward pass one more matrix of its size, as the budget allows.

On several ranks the messages are those of the sweep with the exchange "gather". All ranks take this way, or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._autograd import no_autocast, once_differentiable
from .._precision import accumulation_dtype, wide_dtype
from .._products import inner
from ..comm.inside import reduce_scatter
from ..contract import Facts
from ..logsumexp import log_sum_exp
from ..sweep import NONE, Diagonals
from .route import Layout
from .shifts import never_underflows
from .softmax_plan import SoftmaxPlan

ROWS, COLS = ("sum", "target"), (("sum",), ())  # the fields of rows, and of columns, that this node computes
_UNCHANGED = (None,) * 7


def computes_one_tile(facts: Facts, plan: SoftmaxPlan, layout: Layout, dtype: torch.dtype) -> bool:
    """Return whether this node computes S: the same on all ranks.

    Args:
        facts: of the call.
        plan: of the sweep, which computes S otherwise.
        layout: of S.
        dtype: of the features.
    """
    if plan.shift is None or plan.rows != ROWS or plan.cols not in COLS or plan.in_kernels:
        return False
    form = "one tile", layout.rows.counts, layout.cols.counts, plan.symmetric, dtype, facts.differentiable
    if not facts.once(form, lambda: _may_be_one_tile(facts, plan, layout, dtype)):
        return False
    if not _is_plain(plan, layout.rows.offsets[facts.rank], layout.rows.counts[facts.rank]):
        return False
    return never_underflows(plan.bounds, plan.shift, accumulation_dtype(dtype))


def _may_be_one_tile(facts: Facts, plan: SoftmaxPlan, layout: Layout, dtype: torch.dtype) -> bool:
    """Return whether a call of this form may be one tile."""
    if facts.device.type != "cpu" or facts.products.precision != "float32":  # only the sweep rounds factors
        return False
    if plan.symmetric or plan.dtype is not None or layout.rows.counts != layout.cols.counts:
        return False
    return plan.route.exchange.one_transfer and _fits(facts, plan, layout.rows.counts, accumulation_dtype(dtype))


def _fits(facts: Facts, plan: SoftmaxPlan, counts: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether each rank's part of S is one tile, and is kept in full precision for the backward pass."""
    budget, total = plan.route.budget, sum(counts)
    if len(counts) == 1:
        return total <= budget.side and budget.kept >= total**2 and budget.kept_dtype == dtype
    return set(facts.of_ranks("memory")) == {"auto"} and max(counts) * total <= budget.side**2


def _is_plain(plan: SoftmaxPlan, start: int, count: int) -> bool:
    """Return whether the logits are scaled products, the positives are the diagonal, and all others are candidates."""
    of, towers, positive = plan.selection, plan.towers, plan.selection.pairs.positive
    changed = (of.floor, of.ceiling, of.guide, of.transform, of.offsets, plan.guide, towers.stay_norms)
    return (
        of.over == "negatives"
        and of.best_of == 1
        and of.pairs.excluded is NONE
        and changed == _UNCHANGED
        and (towers.stays, towers.travels, towers.normalize, towers.travel_norms) == ((0,), (1,), False, None)
        and isinstance(positive, Diagonals)
        and positive.places == ((0, start, count),)
    )


class OneTile(torch.autograd.Function):
    """Compute A and T of the rows, and with "sum" among the fields of columns, A of the columns."""

    @staticmethod
    @no_autocast
    def forward(ctx: Any, plan: SoftmaxPlan, scale: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        wide, shift = wide_dtype(x.device), plan.shift
        assert shift is not None
        exchange = plan.route.exchange
        fetched, local = exchange.fetch(y), exchange.kept_local
        # Scale after the product, as in `Driver.logits`.
        logits = torch.mm(_wide(x), _wide(fetched).T).mul_(plan.scale)
        target = logits.diagonal(local.start).to(wide, copy=True)  # before E overwrites it
        exponentials = (logits.sub_(shift) if shift else logits).exp_()
        exponentials.diagonal(local.start).zero_()
        sums = [exponentials.sum(1).to(wide)]
        if plan.cols:
            of_all_columns = exponentials.sum(0).to(wide)
            if exchange.comm.size > 1:
                of_all_columns = exchange.reduce(of_all_columns[:, None], "sum")[local, 0].clone()
            sums.append(of_all_columns)
        ctx.plan = plan
        ctx.save_for_backward(scale if isinstance(scale, Tensor) else None, x, y, fetched, exponentials, *sums)
        of_rows, *of_cols = [log_sum_exp(shift, of_side) for of_side in sums]
        return of_rows, target, *of_cols

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: SoftmaxPlan = ctx.plan
        scale, x, y, fetched, exponentials, *sums = ctx.saved_tensors
        exchange = plan.route.exchange
        _, want_scale, want_x, want_y = ctx.needs_input_grad
        of_rows, of_target, *of_cols = grads
        dtype = exponentials.dtype
        weights = [
            torch.where(grad == 0, 0.0, grad * plan.size / of_side).to(dtype)
            for grad, of_side in zip((of_rows, *of_cols), sums, strict=True)
        ]
        # N dS = E (a_i / R_i + a'_j / C_j) of candidates; t_i of the positives, whose E here is 0
        if len(weights) == 2:
            slope = torch.add(weights[0][:, None], exchange.distribute(weights[1][None])).mul_(exponentials)
        else:
            slope = exponentials * weights[0][:, None]
        slope.diagonal(exchange.kept_local.start).copy_(of_target * plan.size)

        u = torch.mm(slope, _wide(fetched)) if want_x or (want_scale and not want_y) else None
        v = torch.mm(slope.T, _wide(x)) if want_y else None
        if v is not None and exchange.comm.size > 1:
            v = reduce_scatter(exchange.comm, v, exchange.columns.counts)
        grad_scale = None
        if want_scale:
            share = inner(y, v) if v is not None else inner(x, u)
            grad_scale = (share / plan.size).to(scale).view_as(scale)
        factor = plan.scale / plan.size
        dx, dy = (
            z.mul_(factor).to(x.dtype) if z is not None and wanted else None for z, wanted in ((u, want_x), (v, want_y))
        )
        return None, grad_scale, dx, dy


def _wide(x: Tensor) -> Tensor:
    """Return rows in the dtype of sums; those in half precision are widened as a sweep widens the rows of a tile."""
    return x.to(accumulation_dtype(x.dtype))
