"""Equal vectors of an item, so that of several winners with the same vector the first one is taken.

A product of matrices may round the products of equal vectors differently, where its library has other instructions at
the edges of a matrix. Which of them is the largest then depends on the size of a tile, and so on the number of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from .._base.precision import part_size
from .items import Items, numbers_on

_VECTORS, _VECTORS_ON_A_GPU = 2**11, 2**20  # that are sorted at a time, if they are of more than one item
_NUMBERS, _NUMBERS_ON_A_GPU = 2**13, 2**22  # that are read at a time


def first_copies(x: Tensor, items: Items) -> Tensor | None:
    """Return the index of the first vector of the same item that is equal, for each vector; None: no two are equal.

    Vectors are sorted by a hash of their bits, and those with the same hash are compared. The host waits for no GPU, so
    there the index is always returned.

    >>> from wholebatch.partition import Partition, Ragged
    >>> items = Items(Ragged(Partition((2,)), (3, 1)), torch.tensor([0, 3, 4]))
    >>> first_copies(torch.tensor([[1.0], [2.0], [1.0], [1.0]]), items)
    tensor([0, 1, 0, 3])
    """
    index: Tensor | None = None
    for some in _groups(items, part_size("sorted vectors", _VECTORS_ON_A_GPU if x.is_cuda else _VECTORS)):
        part = items.ragged.of(some)
        first = _first_copies(x[part], Items.of(items.ragged, some, x.device).owners)
        if first is not None:
            index = torch.arange(len(x), device=x.device) if index is None else index
            index[part] = first.add_(part.start)
    return index


def _groups(items: Items, most: int) -> Iterator[slice]:
    """Yield consecutive items that have up to so many vectors together, or one item."""
    starts, first = items.ragged.starts, 0
    while first < len(items.ragged.lengths):
        last = max(first + 1, bisect_right(starts, starts[first] + most) - 1)
        yield slice(first, last)
        first = last


def _first_copies(x: Tensor, owners: Tensor) -> Tensor | None:
    """Return the same for some items; `owners` are those of the vectors, (n,)."""
    hashes, order = _hashes(x, owners).sort(stable=True)
    differs = hashes[1:] != hashes[:-1]
    if _may_wait(x) and differs.all():
        return None
    index = torch.arange(len(x), device=x.device)
    starts = torch.where(differs, index[1:], 0).cummax(0).values  # of a run of equal hashes, for each but the first
    first = index.clone()
    first[order[1:]] = order[starts]
    others = (first != index).nonzero()[:, 0] if _may_wait(x) else index
    for some in others.split(_rows_at_once(x)):
        firsts = first[some]
        equal = (owners[some] == owners[firsts]) & (x[some] == x[firsts]).all(1)
        first[some] = torch.where(equal, firsts, some)
    return first


def _may_wait(x: Tensor) -> bool:
    """Return whether the host may read from the device of x."""
    return not x.is_cuda


def _hashes(x: Tensor, owners: Tensor) -> Tensor:
    """Return an integer for each vector: equal ones of an item have the same, and others almost never."""
    bits = x.contiguous().view(torch.int32)
    factors = _factors(bits.shape[1] + 1, x.device)
    sums = [(some * factors[1:]).sum(1) for some in bits.split(_rows_at_once(x))]  # integers: exact in any order
    return torch.cat(sums).add_(owners * factors[0])


def _rows_at_once(x: Tensor) -> int:
    numbers = part_size("compared numbers", _NUMBERS_ON_A_GPU if x.is_cuda else _NUMBERS)
    return max(1, numbers // max(1, x.shape[1]))


@cache
def _factors(count: int, device: torch.device) -> Tensor:
    """Return random odd integers, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu")
    return numbers_on((2 * numbers + 1).tolist(), device)
