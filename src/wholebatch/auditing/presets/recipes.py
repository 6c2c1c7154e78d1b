"""Recipes that circulate for CLIP's loss on several ranks, written out; each is a few lines of many code bases.

local x global    each rank: its rows of the similarity matrix;  global x global: all of it, on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import cross_entropy

import wholebatch as wb

from ..problem import Problem
from .encoders import two_towers

Gather = Callable[[Tensor], Tensor]


def constant(x: Tensor) -> Tensor:
    """All ranks' rows, as `all_gather` gives them: no gradient."""
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)


def own_put_back(x: Tensor) -> Tensor:
    """The same, the rank's own rows with their gradient."""
    all_x, first = constant(x), dist.get_rank() * len(x)
    return torch.cat([all_x[:first], x, all_x[first + len(x) :]])


class _WithGradient(Function):
    """Backward: an all-reduce over ranks, of which each takes its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, average: bool) -> Tensor:
        """All ranks' rows."""
        ctx.rows, ctx.average = len(x), average
        return constant(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The sum, or the average, of what all ranks' losses say about these rows."""
        grad = grad.clone()
        dist.all_reduce(grad)
        if ctx.average:
            grad /= dist.get_world_size()
        return grad.narrow(0, dist.get_rank() * ctx.rows, ctx.rows), None


def summed(x: Tensor) -> Tensor:
    """All ranks' rows, their gradient added up over ranks."""
    return _WithGradient.apply(x, False)


def averaged(x: Tensor) -> Tensor:
    """All ranks' rows, their gradient averaged over ranks."""
    return _WithGradient.apply(x, True)


def global_by_global(gather: Gather, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Every rank computes the whole loss."""
    logits = scale * gather(x) @ gather(y).T
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def local_by_global(gather: Gather, x: Tensor, y: Tensor, scale: Tensor, *, local_gathered: bool = False) -> Tensor:
    """Every rank computes its rows' part: of what it has, or of its own rows among the gathered ones."""
    all_x, all_y = gather(x), gather(y)
    first = dist.get_rank() * len(x)
    if local_gathered:
        x, y = (z.narrow(0, first, len(x)) for z in (all_x, all_y))
    labels = first + torch.arange(len(x))
    return (cross_entropy(scale * x @ all_y.T, labels) + cross_entropy(scale * y @ all_x.T, labels)) / 2


def own_rows_only(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Nothing is gathered."""
    return global_by_global(lambda z: z, x, y, scale)


def _times_w(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return dist.get_world_size() * global_by_global(own_put_back, x, y, scale)


def _no_gather() -> Problem:
    return two_towers(own_rows_only)


def _global() -> Problem:
    return two_towers(partial(global_by_global, own_put_back))


def _global_times_w() -> Problem:
    return two_towers(_times_w)


def _local() -> Problem:
    return two_towers(partial(local_by_global, own_put_back))


def _summed() -> Problem:
    return two_towers(partial(local_by_global, summed))


def _averaged() -> Problem:
    return two_towers(partial(local_by_global, averaged, local_gathered=True))


def _wholebatch() -> Problem:
    return two_towers(wb.CLIPLoss(), uneven=True, empty=True)


SETTINGS: dict[str, Callable[[], Problem]] = {
    "own rows only, nothing gathered": _no_gather,
    "global x global, gathered without gradient, own rows put back": _global,
    "the same, the loss times W": _global_times_w,
    "local x global, gathered without gradient, own rows put back": _local,
    "local x global, all_reduce (sum) in the gather's backward (ED4CT)": _summed,
    "local x global, all_reduce (average) in the gather's backward (DisCo-CLIP)": _averaged,
    "wholebatch.CLIPLoss": _wholebatch,
}
