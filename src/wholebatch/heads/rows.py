"""Rows of a tensor by index, and their sparse gradient; and the overlap of two ranges of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._autograd import once_differentiable


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index], whose gradient by x is a sparse tensor: (n, d), (k,) ascending -> (k, d)."""
    return _Rows.apply(x, index)


def coalesced(grad: Tensor) -> Tensor:
    """Return a sparse gradient with its rows in ascending order, each once; without a copy if it has them so.

    A sample's gradient has, but torch forgets it when it stores a gradient, and `coalesce` would sort and copy again.
    """
    if grad.is_coalesced():
        return grad
    index = grad._indices()
    if len(index) == 1 and bool((index[0, 1:] > index[0, :-1]).all()):
        return _sparse(index, grad._values(), grad.shape)
    return grad.coalesce()


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
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _sparse(index[None], grad, ctx.shape), None


def _sparse(index: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a sparse tensor whose rows are ascending, each once."""
    # As a context and not as an argument: with the argument, torch 2.11 still warns that checks are not set.
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(index, values, shape, is_coalesced=True)
