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
    differentiable: bool  # whether a backward pass may follow
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

    @property
    def keep(self) -> bool:
        """Whether exp(S) is kept for the backward pass."""
        return self.differentiable and self.budget.kept > 0

    def sweep(self, x: Tensor, kept: Tensor | None = None, positives: Sequence[Tensor] = ()) -> SoftmaxSweep:
        """A sweep of X's rows."""
        driver = Driver(x, self.scale, side=self.budget.side, largest=self.exchange.largest_block)
        return SoftmaxSweep(
            driver,
            self.pairs,
            kept=None if kept is None else KeptTiles(kept),
            positives=positives,
            total=self.uniform > 0,
        )


@dataclass(frozen=True)
class _Statistics:
    """What the forward pass finds out: L, and what the backward pass needs."""

    loss: Tensor
    certified: bool  # all sums are exact to rounding
    shift: float | None  # of all sums; None: each has its own
    rows: Tensor | None  # (k, b): sums, and shifts where each has its own; None: symmetric, or no such softmax
    columns: Tensor | None  # (k, columns kept)
    kept: Tensor | None = None
    positives: tuple[Tensor, ...] = ()


def softmax_loss(plan: SoftmaxPlan, scale: Any, bias: Any, features: Sequence[Tensor]) -> Tensor:
    """L of features that `plan.towers` takes apart."""
    # No entries, but a way back to the features, which are not all saved: by it a second derivative is refused.
    anchor = torch.cat([feature[:0].flatten() for feature in features])
    return _Softmax.apply(plan, anchor, scale, bias, *features)


class _Softmax(torch.autograd.Function):
    @staticmethod
    @no_autocast
    def forward(ctx: Any, plan: SoftmaxPlan, anchor: Tensor, scale: Any, bias: Any, *features: Tensor) -> Tensor:
        x, y, norms = plan.towers.join(features)
        held = plan.exchange.bring(y)
        statistics = _statistics(plan, x, held)

        ctx.plan, ctx.shift = plan, statistics.shift
        ctx.features = [(len(feature), feature.dtype) for feature in features]
        scale, bias = (value if isinstance(value, Tensor) else None for value in (scale, bias))
        of_forward = (statistics.rows, statistics.columns, statistics.kept, *statistics.positives)
        ctx.save_for_backward(anchor, scale, bias, x, y, norms, held, *of_forward)
        return statistics.loss.to(accumulation_dtype(x.dtype))

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
        _, scale, bias, x, y, norms, held, rows, columns, kept, *positives = ctx.saved_tensors
        _, _, want_scale, want_bias, *want_features = ctx.needs_input_grad
        want_x, want_y = plan.towers.wanted(want_features)
        if want_scale and not want_x and not want_y:
            want_x, want_y = not plan.symmetric, plan.symmetric
        u = v = None
        if want_x or want_y:
            u, v = _products(plan, x, held, ctx.shift, rows, columns, kept, positives, want_x, want_y)

        grad_scale = None
        if want_scale:
            share = inner(y, v) if v is not None else inner(x, u)
            share = share / (plan.softmaxes * (2 if plan.symmetric else 1))
            grad_scale = grad_loss * loss_parameter_gradient(share, plan.comm, plan.sync)
            grad_scale = grad_scale.to(scale).view_as(scale)
        factor = grad_loss * (plan.scale / plan.softmaxes * feature_factor(plan.sync, plan.comm.size))
        dx, dy = (None if gradient is None else gradient.mul_(factor) for gradient in (u, v))
        wanted = [(want, *of) for want, of in zip(want_features, ctx.features, strict=True)]
        grads = plan.towers.split(dx, dy, x, norms, wanted)
        return None, None, grad_scale, torch.zeros_like(bias) if want_bias else None, *grads


def _statistics(plan: SoftmaxPlan, x: Tensor, held: Tensor) -> _Statistics:
    """L and all sums: relative to one shift if that is certain to do, else each relative to its own maximum."""
    shift = shared_shift(plan.bound, plan.longest, accumulation_dtype(x.dtype))
    if shift is not None:
        kept = x.new_empty(plan.budget.kept, dtype=plan.budget.kept_dtype) if plan.keep else None
        statistics = _sums(plan, x, held, shift, shift, kept)
        if statistics.certified:
            return statistics
        del statistics, kept
    return _sums(plan, x, held, *_maxima(plan, x, held))


def _maxima(plan: SoftmaxPlan, x: Tensor, held: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The largest logit of each row, and of each column kept, of the directions that there are."""
    nothing = x.new_full((1,), float("-inf"), dtype=accumulation_dtype(x.dtype))
    row_max = nothing.repeat(len(x)) if plan.rows and not plan.symmetric else None
    sweep = plan.sweep(x)

    def visit(block: Block, _carried: Tensor | None, into: Tensor | None, own: Tensor | None) -> None:
        sweep.maxima(block, own if plan.symmetric else row_max, into)

    col_max = plan.exchange.collect(held, visit, initial=nothing if plan.cols else None, op="max")
    if col_max is None:
        return row_max, None
    col_max = plan.exchange.merge(col_max, "max")
    return col_max[plan.exchange.kept_own] if plan.symmetric else row_max, col_max


def _sums(
    plan: SoftmaxPlan,
    x: Tensor,
    held: Tensor,
    row_shift: Tensor | float | None,
    col_shift: Tensor | float | None,
    kept: Tensor | None = None,
) -> _Statistics:
    """L and all sums, relative to one shift, or to (b,) and (columns kept,) of them."""
    zero = x.new_zeros(1, dtype=accumulation_dtype(x.dtype))
    row_sums = zero.repeat(len(x)) if plan.rows and not plan.symmetric else None
    sweep = plan.sweep(x, kept)
    carried = col_shift[None] if isinstance(col_shift, Tensor) else None

    def visit(block: Block, carried: Tensor | None, into: Tensor | None, own: Tensor | None) -> None:
        rows = _pairs(row_shift, own if plan.symmetric else row_sums)
        sweep.sums(block, rows, _pairs(col_shift if carried is None else carried[0], into))

    col_sums = plan.exchange.collect(held, visit, carried=carried, initial=zero if plan.cols else None)
    targets = (1 - plan.label_smoothing) * sweep.target_logit + plan.uniform * sweep.total_logit
    row_numbers = torch.stack([-targets, torch.zeros_like(targets)])
    if row_sums is not None:
        row_numbers = row_numbers + _numbers(_pairs(row_shift, row_sums), plan.longest)
    col_sums, numbers = plan.exchange.finish(
        col_sums, row_numbers, lambda sums: _numbers(_pairs(col_shift, sums), plan.longest)
    )
    return _Statistics(
        numbers[0] / plan.softmaxes,
        certified=not numbers[1].item(),
        shift=None if isinstance(row_shift, Tensor) or isinstance(col_shift, Tensor) else row_shift,
        rows=_stacked(row_shift, row_sums),
        columns=_stacked(col_shift, col_sums),
        kept=kept,
        positives=() if kept is None else tuple(sweep.positives),
    )


def _pairs(shift: Tensor | float | None, sums: Tensor | None) -> LogSumExp | None:
    return None if sums is None or shift is None else LogSumExp(shift, sums)


def _numbers(pairs: LogSumExp | None, longest: int) -> Tensor:
    """What the softmaxes of rows or columns add to N L, and how many of their sums are not certified."""
    assert pairs is not None
    value = pairs.value(wide_dtype(pairs.sum.device)).sum()
    if isinstance(pairs.shift, Tensor):
        return torch.stack([value, torch.zeros_like(value)])
    return torch.stack([value, uncertified(pairs.sum, longest).to(value.dtype)])


def _stacked(shift: Tensor | float | None, sums: Tensor | None) -> Tensor | None:
    """Sums, and shifts where each has its own: (k, n)."""
    if sums is None:
        return None
    return torch.stack([sums, shift]) if isinstance(shift, Tensor) else sums[None]


def _products(
    plan: SoftmaxPlan,
    x: Tensor,
    held: Tensor,
    shift: float | None,
    rows: Tensor | None,
    columns: Tensor | None,
    kept: Tensor | None,
    positives: Sequence[Tensor],
    want_x: bool,
    want_y: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """U, and V at home; of a symmetric S, both in one, in the place of V."""
    dtype = accumulation_dtype(x.dtype)
    u = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if want_x else None
    sweep = plan.sweep(x, kept, positives)
    if plan.symmetric and columns is not None:
        rows = columns[:, plan.exchange.kept_own]

    def pairs(numbers: Tensor | None) -> LogSumExp | None:
        return None if numbers is None else LogSumExp(numbers[1] if shift is None else shift, numbers[0])

    def visit(block: Block, carried: Tensor | None, into: Tensor | None, own: Tensor | None) -> None:
        sweep.gradients(
            block,
            pairs(rows),
            pairs(carried),
            positive=plan.positive,
            uniform=plan.uniform,
            u=own if plan.symmetric else u,
            v=into,
        )

    initial = x.new_zeros(1, x.shape[1], dtype=dtype) if want_y else None
    v = plan.exchange.collect(held, visit, carried=columns, initial=initial)
    return u, None if v is None else plan.exchange.home(v)
