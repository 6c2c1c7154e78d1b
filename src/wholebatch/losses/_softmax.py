"""Every loss that is a mean of softmax cross-entropies over rows, columns or both of S, as one autograd node.

    N L = sum_i (log R_i + c) + sum_j (log C_j + c) - sum over all softmaxes of their target's logit

R_i is whole on the row's rank; C_j is partial until the exchange has merged it. A loss says in its `SoftmaxPlan` which
directions it has, which pairs are positive and which are excluded; the rest is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._once import once_differentiable
from .._precision import accumulation_dtype, wide_dtype
from ..comm import Communicator
from ..exchange import Exchange
from ..logsumexp import LogSumExp, shared_shift, uncertified
from ..sweep import Block, Budget, Driver, KeptTiles, Pairs, SoftmaxSweep
from ..sync import Sync, feature_factor, loss_parameter_gradient
from ._towers import Towers, inner, no_autocast


@dataclass(frozen=True)
class SoftmaxPlan:
    """What forward and backward of one call have in common."""

    comm: Communicator
    exchange: Exchange
    towers: Towers
    pairs: Pairs
    scale: float
    bound: float  # no logit is larger
    softmaxes: int  # N
    longest: int  # the most terms of a softmax
    rows: bool  # whether the rows of S have a softmax
    cols: bool
    budget: Budget
    sync: Sync
    label_smoothing: float = 0.0

    @property
    def symmetric(self) -> bool:
        """Whether the columns of S are its rows: their statistics are then the rows' as well."""
        return self.exchange.symmetric

    @property
    def positive(self) -> float:
        """What a positive pair loses in N dS: 1 - e, the weight of a target, in each direction."""
        return (self.rows + self.cols) * (1 - self.label_smoothing)

    @property
    def uniform(self) -> float:
        """What every entry loses in N dS: e / n, the weight of all n candidates, in each direction."""
        return (self.rows + self.cols) * self.label_smoothing / self.longest

    def sweep(self, x: Tensor, kept: Tensor | None = None, positives: Sequence[Tensor] = ()) -> SoftmaxSweep:
        """A sweep of X's rows."""
        driver = Driver(x, self.scale, side=self.budget.side)
        return SoftmaxSweep(
            driver,
            self.pairs,
            kept=None if kept is None else KeptTiles(kept),
            positives=positives,
            total=self.uniform > 0,
        )


@dataclass(frozen=True)
class _Statistics:
    """What the forward pass finds out and the backward pass needs."""

    shift: float | None  # of all sums; None: each has its own
    rows: Tensor | None  # (k, b): sums, and shifts where each has its own; None: symmetric, or no such softmax
    columns: Tensor | None  # (k, columns kept)
    kept: Tensor | None = None
    positives: tuple[Tensor, ...] = ()

    def pairs(self, numbers: Tensor | None) -> LogSumExp | None:
        """`numbers`, (k, n), as pairs of shift and sum."""
        if numbers is None:
            return None
        return LogSumExp(numbers[1] if self.shift is None else self.shift, numbers[0])


class Softmax(torch.autograd.Function):
    """L of features that `plan.towers` takes apart."""

    @staticmethod
    @no_autocast
    def forward(ctx: Any, plan: SoftmaxPlan, scale: Any, bias: Any, *features: Tensor) -> Tensor:
        x, y, norms = plan.towers.join(features)
        held = plan.exchange.bring(y)
        dtype = accumulation_dtype(x.dtype)
        shift = shared_shift(plan.bound, plan.longest, dtype)
        loss = statistics = None
        if shift is not None:
            loss, statistics = _one_shift(plan, x, held, shift, keep=any(ctx.needs_input_grad))
        if loss is None:
            loss, statistics = _own_shifts(plan, x, held)
        assert statistics is not None

        ctx.plan, ctx.shift = plan, statistics.shift
        ctx.features = [(len(feature), feature.dtype) for feature in features]
        scale, bias = (value if isinstance(value, Tensor) else None for value in (scale, bias))
        ctx.save_for_backward(
            scale,
            bias,
            x,
            y,
            norms,
            held,
            statistics.rows,
            statistics.columns,
            statistics.kept,
            *(statistics.positives if statistics.kept is not None else ()),
        )
        return loss.to(dtype)

    # With U = N dS Y and V = N dS^T X (see `sweep.softmax` for N dS),
    #
    #     dL/dX     = scale / N U
    #     dL/dY     = scale / N V, summed over the ranks, whose rows each see all of Y
    #     dL/dscale = 1 / N sum_ij N dS_ij x_i . y_j = 1 / N <X, U> = 1 / N <Y, V>, summed over the ranks
    #     dL/dbias  = 1 / N sum_ij N dS_ij = 0: P, Q and the targets are distributions
    #
    # Of a symmetric S, N (dS + dS^T) Z takes the place of U and V together, and <Z, that> is twice dL/dscale.
    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:
        plan: SoftmaxPlan = ctx.plan
        scale, bias, x, y, norms, held, rows, columns, kept, *positives = ctx.saved_tensors
        _, want_scale, want_bias, *want_features = ctx.needs_input_grad
        want_x, want_y = plan.towers.wanted(want_features)
        if want_scale and not want_x and not want_y:
            want_x, want_y = not plan.symmetric, plan.symmetric
        statistics = _Statistics(ctx.shift, rows, columns, kept, tuple(positives))
        u, v = _products(plan, x, held, statistics, want_x, want_y)

        grad_scale = None
        if want_scale:
            share = inner(x, u) if u is not None else inner(y, v)
            share = share / (plan.softmaxes * (2 if plan.symmetric else 1))
            grad_scale = grad_loss * loss_parameter_gradient(share, plan.comm, plan.sync)
            grad_scale = grad_scale.to(scale).view_as(scale)
        factor = grad_loss * (plan.scale / plan.softmaxes * feature_factor(plan.sync, plan.comm.size))
        dx, dy = (None if gradient is None else gradient.mul_(factor) for gradient in (u, v))
        wanted = [(want, *of) for want, of in zip(want_features, ctx.features, strict=True)]
        grads = plan.towers.split(dx, dy, x, norms, wanted)
        return None, grad_scale, torch.zeros_like(bias) if want_bias else None, *grads


def _one_shift(
    plan: SoftmaxPlan, x: Tensor, held: Tensor, shift: float, *, keep: bool
) -> tuple[Tensor, _Statistics] | tuple[None, None]:
    """L, and all sums relative to one shift; (None, None), on all ranks, if some rank's sums are not certified."""
    dtype = accumulation_dtype(x.dtype)
    kept = x.new_empty(plan.budget.kept, dtype=plan.budget.kept_dtype) if keep and plan.budget.kept else None
    sweep = plan.sweep(x, kept)
    row_sums = x.new_zeros(len(x), dtype=dtype) if plan.rows and not plan.symmetric else None

    def visit(block: Block, _carried: Tensor | None, into: Tensor | None, own: Tensor | None) -> None:
        rows, cols = (None if sums is None else LogSumExp(shift, sums) for sums in (_either(own, row_sums), into))
        sweep.sums(block, rows, cols)

    def numbers(sums: Tensor) -> Tensor:
        """The sum of the softmaxes' normalisers, and how many of them are not certified."""
        value = LogSumExp(shift, sums).value(wide_dtype(sums.device)).sum()
        return torch.stack([value, uncertified(sums, plan.longest).to(value.dtype)])

    col_sums = plan.exchange.collect(held, visit, initial=x.new_zeros(1, dtype=dtype) if plan.cols else None)
    targets = _targets(plan, sweep)
    row_numbers = torch.stack([-targets, torch.zeros_like(targets)])
    if row_sums is not None:
        row_numbers = row_numbers + numbers(row_sums)
    col_sums, total = plan.exchange.finish(col_sums, row_numbers, numbers)
    if total[1].item():
        return None, None
    rows, columns = (None if sums is None else sums[None] for sums in (row_sums, col_sums))
    return total[0] / plan.softmaxes, _Statistics(shift, rows, columns, kept, tuple(sweep.positives))


def _own_shifts(plan: SoftmaxPlan, x: Tensor, held: Tensor) -> tuple[Tensor, _Statistics]:
    """L, and each row's and column's sum relative to its own largest logit, for which there is one more pass."""
    dtype = accumulation_dtype(x.dtype)
    row_max = x.new_full((len(x),), float("-inf"), dtype=dtype) if plan.rows and not plan.symmetric else None

    def visit_maxima(block: Block, _carried: Tensor | None, into: Tensor | None, own: Tensor | None) -> None:
        plan.sweep(x).maxima(block, _either(own, row_max), into)

    least = x.new_full((1,), float("-inf"), dtype=dtype) if plan.cols else None
    col_max = plan.exchange.collect(held, visit_maxima, initial=least, op="max")
    if col_max is not None:
        col_max = plan.exchange.merge(col_max, "max")
    row_shift = col_max[plan.exchange.kept_own] if plan.symmetric and col_max is not None else row_max
    row_sums = None if row_max is None else torch.zeros_like(row_max)
    sweep = plan.sweep(x)

    def visit(block: Block, carried: Tensor | None, into: Tensor | None, own: Tensor | None) -> None:
        rows = cols = None
        if row_shift is not None:
            rows = LogSumExp(row_shift, _either(own, row_sums))
        if into is not None and carried is not None:
            cols = LogSumExp(carried[0], into)
        sweep.sums(block, rows, cols)

    def numbers(shift: Tensor, sums: Tensor) -> Tensor:
        return LogSumExp(shift, sums).value(wide_dtype(sums.device)).sum()[None]

    initial = x.new_zeros(1, dtype=dtype) if plan.cols else None
    carried = None if col_max is None else col_max[None]
    col_sums = plan.exchange.collect(held, visit, carried=carried, initial=initial)
    row_numbers = -_targets(plan, sweep)[None]
    if row_max is not None and row_sums is not None:
        row_numbers = row_numbers + numbers(row_max, row_sums)
    col_sums, total = plan.exchange.finish(col_sums, row_numbers, lambda sums: numbers(col_max, sums))
    rows = None if row_sums is None else torch.stack([row_sums, row_max])
    columns = None if col_sums is None else torch.stack([col_sums, col_max])
    return total[0] / plan.softmaxes, _Statistics(None, rows, columns)


def _targets(plan: SoftmaxPlan, sweep: SoftmaxSweep) -> Tensor:
    """Of this rank's rows, the sum over all softmaxes of the mean logit under the target distribution."""
    return (1 - plan.label_smoothing) * sweep.target_logit + plan.uniform * sweep.total_logit


def _products(
    plan: SoftmaxPlan, x: Tensor, held: Tensor, statistics: _Statistics, want_x: bool, want_y: bool
) -> tuple[Tensor | None, Tensor | None]:
    """U and V; of a symmetric S, both in one, in the place of V."""
    dtype = accumulation_dtype(x.dtype)
    u = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if want_x else None
    sweep = plan.sweep(x, statistics.kept, statistics.positives)
    own_rows = statistics.rows
    if plan.symmetric and statistics.columns is not None:
        own_rows = statistics.columns[:, plan.exchange.kept_own]

    def visit(block: Block, carried: Tensor | None, into: Tensor | None, own: Tensor | None) -> None:
        sweep.gradients(
            block,
            statistics.pairs(own_rows),
            statistics.pairs(carried),
            positive=plan.positive,
            uniform=plan.uniform,
            u=_either(own, u),
            v=into,
        )

    initial = x.new_zeros(1, x.shape[1], dtype=dtype) if want_y else None
    v = plan.exchange.collect(held, visit, carried=statistics.columns, initial=initial)
    return u, None if v is None else plan.exchange.home(v)


def _either(own: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Of a symmetric S, a rank's rows are among the columns: `own`."""
    return other if own is None else own
