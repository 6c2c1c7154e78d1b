"""Smooth ranks of positives, as an autograd node: how many rows are more similar to an anchor than each positive is.

    all_ip      = sum_j sigmoid((s_ij - s_ip) / temperature)       over all other rows j
    positive_ip = the same over the positives j                    s: cosines, p: a positive of row i

Two passes forward, because a rank needs the positive's similarity first; one backward (see `sweep.ranking`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._autograd import no_autocast, once_differentiable
from .._precision import wide_dtype
from ..sweep import Block, Pairs, RankingSweep
from .route import Route


@dataclass(frozen=True)
class RankingPlan:
    """What the forward and the backward pass of one call have in common."""

    route: Route
    pairs: Pairs
    most: int  # P, the most positives of a row
    temperature: float

    def sweep(self, x: Tensor) -> RankingSweep:
        """Return a sweep of X's rows."""
        return RankingSweep(self.route.driver(x, 1.0), self.pairs, self.most, self.temperature)


class PositiveRanks(torch.autograd.Function):
    """all_ip and positive_ip of this rank's rows, (b, P) each."""

    @staticmethod
    @no_autocast
    def forward(ctx: Any, plan: RankingPlan, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        held = plan.route.exchange.fetch(y)
        of_positives = x.new_zeros(len(x), plan.most)
        sums = x.new_zeros(4, len(x), plan.most, dtype=wide_dtype(x.device))
        first, second = plan.sweep(x), plan.sweep(x)
        plan.route.exchange.accumulate(held, lambda block, *_: first.similarities(block, of_positives))
        plan.route.exchange.accumulate(held, lambda block, *_: second.sums(block, of_positives, sums))
        ctx.plan = plan
        ctx.save_for_backward(x, y, held, of_positives, sums)
        return sums[0].clone(), sums[1].clone()

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, of_all: Tensor, of_positive: Tensor) -> tuple[Any, ...]:
        plan: RankingPlan = ctx.plan
        x, _, held, of_positives, sums = ctx.saved_tensors
        all_, positive = of_all / plan.temperature, of_positive / plan.temperature
        local = -(all_ * sums[2] + positive * sums[3])
        all_, positive, local = (z.to(x.dtype) for z in (all_, positive, local))
        u, sweep = torch.zeros_like(x), plan.sweep(x)

        def visit(block: Block, _carried: Tensor | None, into: Tensor | None, _local: Tensor | None) -> None:
            sweep.gradients(block, of_positives, all_, positive, local, u, into)

        v = plan.route.exchange.accumulate(held, visit, initial=x.new_zeros(1, x.shape[1]), to_owner=True)
        assert v is not None
        return None, u, v
