"""A gradient in pieces of rows, so that an update of its rows passes once through memory and needs none of its size.

    rows = take(x)         the rows of x that have a gradient: a copy that stays in the cache; dense gradients: a view
    change rows in place
    put(x, rows)           write them back; a view needs no writing

A step that takes all rows at once reads and writes each of its intermediate results in memory, and allocates them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from .._base.sparse_rows import coalesced


def _numbers_at_a_time(device: torch.device) -> int:
    """Return how many numbers of a gradient to process at a time: some pieces fit into a CPU's cache; a GPU is busy."""
    return 2**16 if device.type == "cpu" else 2**24


@dataclass(frozen=True)
class Piece:
    """Some rows of a gradient, (n, ...).

    Args:
        grad: the gradient of these rows, which is not changed.
        at: their places, if the gradient is dense.
        index: (n,), their places, ascending, if it is sparse.
        buffers: memory for each use, shared by all pieces.
    """

    grad: Tensor
    rows: slice
    index: Tensor | None
    buffers: dict[str, Tensor]

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


@dataclass(frozen=True)
class Pieces:
    """The pieces of a gradient, one after the other; each row is in one of them.

    Args:
        grad: dense, or sparse with one sparse dimension, its rows, in any order and repeated.

    Raises:
        ValueError: for another number of sparse dimensions.
    """

    grad: Tensor
    _buffers: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.grad.is_sparse and self.grad.sparse_dim() != 1:
            raise ValueError(f"a sparse gradient must have 1 sparse dimension, its rows, got {self.grad.sparse_dim()}")

    def __iter__(self) -> Iterator[Piece]:
        values, index = self.grad, None
        if values.is_sparse:
            ascending = coalesced(values)
            values, index = ascending._values(), ascending._indices()[0]
        most = max(1, _numbers_at_a_time(values.device) // max(1, prod(values.shape[1:])))
        for start in range(0, len(values), most):
            rows = slice(start, start + most)
            yield Piece(values[rows], rows, None if index is None else index[rows], self._buffers)
