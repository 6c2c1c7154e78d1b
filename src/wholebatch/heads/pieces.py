"""A gradient in pieces of rows, so that an update of its rows passes once through memory and needs none of its size.

    rows = take(x)         the rows of x that have a gradient: a copy that stays in the cache; dense gradients: a view
    change rows in place
    put(x, rows)           write them back; a view needs no writing

A step that takes all rows at once reads and writes each of its intermediate results in memory, and allocates them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .._base.sparse_rows import coalesced


def _numbers_at_a_time(device: torch.device) -> int:
    """Return how many numbers of a gradient to process at a time: some pieces fit into a CPU's cache; a GPU is busy."""
    return 2**16 if device.type == "cpu" else 2**24


@dataclass(frozen=True)
class Piece:
    """Some rows of a gradient, (n, ...)."""

    grad: Tensor  # of these rows; it is not changed
    rows: slice  # their places, if the gradient is dense
    index: Tensor | None  # (n,), their places, ascending, if it is sparse
    buffers: dict[str, Tensor]  # memory for each use, shared by all pieces

    def take(self, name: str, x: Tensor) -> Tensor:
        """Return these rows of x, to be changed in place; a copy lies in the buffer `name`."""
        if self.index is None:
            return x[self.rows]
        return torch.index_select(x, 0, self.index, out=self.buffer(name, x))

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Write these rows, from `take`, back to x."""
        if self.index is not None:
            x.index_copy_(0, self.index, rows)

    def buffer(self, name: str, like: Tensor | None = None) -> Tensor:
        """Return memory for these rows of `like`, or of the gradient; the first piece is the largest."""
        like = self.grad if like is None else like
        if name not in self.buffers:
            self.buffers[name] = like.new_empty(len(self.grad), *like.shape[1:])
        return self.buffers[name][: len(self.grad)]


def pieces(grad: Tensor) -> Iterator[Piece]:
    """Return the pieces of a gradient, one after the other; each row is in one of them.

    A sparse gradient has one sparse dimension, its rows, in any order and repeated; for others this raises ValueError.
    """
    index: Tensor | None = None
    if grad.is_sparse:
        if grad.sparse_dim() != 1:
            raise ValueError(f"a sparse gradient must have 1 sparse dimension, its rows, got {grad.sparse_dim()}")
        ascending = coalesced(grad)
        grad, index = ascending._values(), ascending._indices()[0]
    most = max(1, _numbers_at_a_time(grad.device) // max(1, prod(grad.shape[1:])))
    parts = (slice(start, start + most) for start in range(0, len(grad), most))
    buffers: dict[str, Tensor] = {}
    return (Piece(grad[rows], rows, None if index is None else index[rows], buffers) for rows in parts)
