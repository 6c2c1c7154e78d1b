"""Some rows of a parameter, whose gradient is of these rows alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._once import once_differentiable


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], whose gradient by x is a sparse tensor: (n, d), (k,) ascending -> (k, d)."""
    return _Rows.apply(x, index)


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
        return torch.sparse_coo_tensor(index[None], grad, ctx.shape, is_coalesced=True, check_invariants=False), None
