"""Recipes for CLIP's loss on several ranks that circulate in many code bases, written out.

local x global     each rank computes its rows of the similarity matrix
global x global    each rank computes the whole matrix
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
    """Gather all ranks' rows without gradient, as `all_gather` does."""
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)


def local_put_back(x: Tensor) -> Tensor:
    """Gather all ranks' rows; the local ones carry their gradient."""
    all_x, first = constant(x), dist.get_rank() * len(x)
    return torch.cat([all_x[:first], x, all_x[first + len(x) :]])


class _WithGradient(Function):
    """A gather whose backward is an all-reduce, of which each rank takes its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, average: bool) -> Tensor:
        """Gather all ranks' rows."""
        ctx.rows, ctx.average = len(x), average
        return constant(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sum, or the average, of all ranks' gradients by the local rows."""
        grad = grad.clone()
        dist.all_reduce(grad)
        if ctx.average:
            grad /= dist.get_world_size()
        return grad.narrow(0, dist.get_rank() * ctx.rows, ctx.rows), None


def summed(x: Tensor) -> Tensor:
    """Gather all ranks' rows; their gradient is summed over ranks."""
    return _WithGradient.apply(x, False)


def averaged(x: Tensor) -> Tensor:
    """Gather all ranks' rows; their gradient is averaged over ranks."""
    return _WithGradient.apply(x, True)


def global_by_global(gather: Gather, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Compute the whole loss on every rank."""
    logits = scale * gather(x) @ gather(y).T
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def local_by_global(gather: Gather, x: Tensor, y: Tensor, scale: Tensor, *, local_gathered: bool = False) -> Tensor:
    """Compute the part of the local rows; with `local_gathered` the local rows are taken from the gathered ones."""
    all_x, all_y = gather(x), gather(y)
    first = dist.get_rank() * len(x)
    if local_gathered:
        x, y = (z.narrow(0, first, len(x)) for z in (all_x, all_y))
    labels = first + torch.arange(len(x))
    return (cross_entropy(scale * x @ all_y.T, labels) + cross_entropy(scale * y @ all_x.T, labels)) / 2


def local_rows_only(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Compute the loss of the local rows alone."""
    return global_by_global(lambda z: z, x, y, scale)


def _times_w(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return dist.get_world_size() * global_by_global(local_put_back, x, y, scale)


def _wholebatch() -> Problem:
    return two_towers(wb.CLIPLoss(), uneven=True, empty=True)


_RECIPES: dict[str, Callable[..., Tensor]] = {
    "local rows only, nothing gathered": local_rows_only,
    "global x global, gathered without gradient, local rows put back": partial(global_by_global, local_put_back),
    "the same, the loss times W": _times_w,
    "local x global, gathered without gradient, local rows put back": partial(local_by_global, local_put_back),
    "local x global, all_reduce (sum) in the gather's backward (ED4CT)": partial(local_by_global, summed),
    "local x global, all_reduce (average) in the gather's backward (DisCo-CLIP)": partial(
        local_by_global, averaged, local_gathered=True
    ),
}
SETTINGS: dict[str, Callable[[], Problem]] = {
    **{name: partial(two_towers, recipe) for name, recipe in _RECIPES.items()},
    "wholebatch.CLIPLoss": _wholebatch,
}
