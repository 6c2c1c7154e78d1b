"""Rows of a tensor by index, their norms and their sparse gradient; and the overlap of two ranges of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.autograd import once_differentiable
from .._base.normalize import known_norms
from .._base.precision import wide_dtype
from .._base.sparse_rows import sparse_rows
from ..kernels import row_numbers


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index], whose gradient by x is a sparse tensor: (n, d), (k,) ascending -> (k, d)."""
    return _Rows.apply(x, index)


def matrix(x: Tensor) -> Tensor:
    """Return the groups of x as rows, (n, K, d) -> (n K, d), with a sparse gradient of whole groups; a matrix itself.

    The gradient by the result must be sparse; torch's own `flatten` takes dense gradients only.
    """
    return x if x.dim() == 2 else _Matrix.apply(x)


def rows_of_each(index: Tensor, size: int) -> Tensor:
    """Return the rows of each group of `size` rows, (k,) -> (k size,).

    >>> rows_of_each(torch.tensor([0, 2]), 3)
    tensor([0, 1, 2, 6, 7, 8])
    """
    return index if size == 1 else (size * index[:, None] + torch.arange(size, device=index.device)).flatten()


def norms_of(x: Tensor, index: Tensor | None = None, *, in_kernels: bool) -> Tensor:
    """Return |x| of each row of a matrix, or of those in `index`, (rows, 1), without a gradient."""
    if not in_kernels:
        return known_norms(x, index)
    x = x if index is None else x.index_select(0, index)
    return row_numbers(x, x[:0], ()).norms[:, None]


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
        return sparse_rows(index, grad, ctx.shape), None


class KnownNorms(torch.autograd.Function):
    """Return norms of the rows of x that are known, (rows, 1), in the dtype of statistics, with a gradient by x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norms: Tensor) -> Tensor:
        ctx.save_for_backward(x, norms)
        return norms.to(wide_dtype(x.device), copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, norms = ctx.saved_tensors
        return (x / norms * grad).to(x.dtype), None


class _Matrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        size = ctx.shape[1]
        index, values = grad._indices()[0, ::size] // size, grad._values().unflatten(0, (-1, size))
        return sparse_rows(index, values, ctx.shape)
