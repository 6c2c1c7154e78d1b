"""Smooth ranks of positives, as an autograd node: for each positive, a smooth count of the rows that are nearer.

    all_ip      = sum_j sigmoid((s_ij - s_ip) / temperature)       over all other rows j
    positive_ip = the same over the positives j                    s: cosines, p: a positive of row i

The forward pass makes two passes over S: the first finds the similarities of positives, the second counts. The backward
pass makes one (see `sweep.ranking`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.precision import wide_dtype
from ..exchange import ColumnData, zeros
from ..sweep import Block, Pairs, RankingSweep
from .route import Route


@dataclass(frozen=True)
class RankingPlan:
    """The facts that the forward and the backward pass of one call share."""

    route: Route
    pairs: Pairs
    most: int  # P, the most positives of a row
    temperature: float

    def sweep(self, x: Tensor) -> RankingSweep:
        """Return a sweep of X's rows."""
        return RankingSweep(self.route.driver(x, 1.0), self.pairs, self.most, self.temperature)


class PositiveRanks(torch.autograd.Function):
    """Compute all_ip and positive_ip of the local rows, (b, P) each."""

    @staticmethod
    @no_autocast
    def forward(ctx: Any, plan: RankingPlan, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        fetched = plan.route.exchange.fetch(y)
        similarities = x.new_zeros(len(x), plan.most)
        sums = x.new_zeros(4, len(x), plan.most, dtype=wide_dtype(x.device))
        first, second = plan.sweep(x), plan.sweep(x)
        plan.route.exchange.accumulate(fetched, lambda block, *_: first.similarities(block, similarities))
        plan.route.exchange.accumulate(fetched, lambda block, *_: second.sums(block, similarities, sums))
        ctx.plan = plan
        ctx.save_for_backward(x, y, fetched, similarities, sums)
        return sums[0].clone(), sums[1].clone()

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, grad_all: Tensor, grad_positive: Tensor) -> tuple[Any, ...]:
        plan: RankingPlan = ctx.plan
        x, _, fetched, similarities, sums = ctx.saved_tensors
        grad_all, grad_positive = grad_all / plan.temperature, grad_positive / plan.temperature
        grad_compared = -(grad_all * sums[2] + grad_positive * sums[3])
        all_grads, positive_grads, compared_grads = (z.to(x.dtype) for z in (grad_all, grad_positive, grad_compared))
        u, sweep = torch.zeros_like(x), plan.sweep(x)

        def visit(block: Block, columns: ColumnData) -> None:
            sweep.gradients(block, similarities, all_grads, positive_grads, compared_grads, u, columns.accumulated)

        v = plan.route.exchange.accumulate(fetched, visit, initial=zeros(x, x.shape[1], x.dtype), to_owner=True)
        assert v is not None
        return None, u, v
