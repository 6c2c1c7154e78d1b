"""Rows of a tensor by index, with a sparse gradient; and the overlap of two ranges of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._autograd import once_differentiable


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index], whose gradient by x is a sparse tensor: (n, d), (k,) ascending -> (k, d)."""
    return _Rows.apply(x, index)


def overlap(start: int, count: int, first: int, length: int) -> tuple[slice, slice] | None:
    """Return the rows shared by [start, start + count) and [first, first + length), relative to each; None if none.

    >>> overlap(0, 4, 3, 5), overlap(0, 3, 3, 5)
    ((slice(3, 4, None), slice(0, 1, None)), None)
    """
    low, high = max(start, first), min(start + count, first + length)
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
        # As a context and not as an argument: with the argument, torch 2.11 still warns that checks are not set.
        with torch.sparse.check_sparse_tensor_invariants(False):
            return torch.sparse_coo_tensor(index[None], grad, ctx.shape, is_coalesced=True), None
