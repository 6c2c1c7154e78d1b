"""Some rows of a tensor: by their index, with a gradient of these rows alone; and where two runs of rows overlap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._autograd import once_differentiable


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], whose gradient by x is a sparse tensor: (n, d), (k,) ascending -> (k, d)."""
    return _Rows.apply(x, index)


def overlap(start: int, count: int, first: int, held: int) -> tuple[slice, slice] | None:
    """The rows that [start, start + count) and [first, first + held) share, as rows of the one and of the other.

    >>> overlap(0, 4, 3, 5), overlap(0, 3, 3, 5)
    ((slice(3, 4, None), slice(0, 1, None)), None)
    """
    low, high = max(start, first), min(start + count, first + held)
    return (slice(low - start, high - start), slice(low - first, high - first)) if low < high else None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        # Not by the argument of this name: torch 2.11 then still warns that nobody has asked for checks or none.
        with torch.sparse.check_sparse_tensor_invariants(False):
            return torch.sparse_coo_tensor(index[None], grad, ctx.shape, is_coalesced=True), None
