"""Sparse gradients whose rows are ascending, each once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sparse_rows(index: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the sparse tensor with these rows; the index, (n,), is ascending, each row once."""
    # As a context and not as an argument: with the argument, torch 2.11 still warns that checks are not set.
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(index[None], values, tuple(shape), device=values.device, is_coalesced=True)


def coalesced(grad: Tensor) -> Tensor:
    """Return a sparse gradient with its rows in ascending order, each once; without a copy if it has them so.

    A sample's gradient has, but torch forgets it when it stores a gradient, and `coalesce` would sort and copy again.
    """
    if grad.is_coalesced():
        return grad
    index = grad._indices()
    if len(index) == 1 and bool((index[0, 1:] > index[0, :-1]).all()):
        return sparse_rows(index[0], grad._values(), grad.shape)
    return grad.coalesce()
