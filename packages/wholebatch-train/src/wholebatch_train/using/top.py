"""The most similar rows, by exact search in tiles."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MOST_PRODUCTS = 2**22  # similarities that are held at a time
_LAST = 2**32 - 1  # rows are numbered below it


def most_similar(queries: Tensor, tiles: Iterable[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Return the similarities and the rows of the k most similar rows of each query, (q, k) each, the best first.

    Of equal similarities the lowest row comes first. With fewer rows than k, all of them are returned.

    Args:
        queries: (q, d).
        tiles: the rows, (m, d) at a time, in order.
        k: number of rows to find.

    >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> most_similar(torch.tensor([[0.6, 0.8]]), rows.split(2), 2)[1]
    tensor([[1, 0]])
    """
    best = torch.empty(len(queries), 0, dtype=torch.int64)
    start = 0
    step = max(1, _MOST_PRODUCTS // max(1, len(queries)))
    for tile in tiles:
        for rows in tile.split(step):
            keys = ordered(queries @ rows.T) << 32 | (_LAST - torch.arange(start, start + len(rows)))
            best = torch.cat([best, keys.topk(min(k, len(rows)), dim=1).values], dim=1)
            best = best.topk(min(k, best.shape[1]), dim=1).values
            start += len(rows)
    return _similarities(best >> 32), _LAST - (best & _LAST)


def ordered(similarities: Tensor) -> Tensor:
    """Return float32 numbers as integers of 32 bits, in int64, with the same order; equal numbers stay equal."""
    bits = (similarities.float() + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _similarities(order: Tensor) -> Tensor:
    bits = order.int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
