"""The rows, or the columns, of a tile whose rows and columns are several vectors each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..partition import Partition, Ragged


@dataclass(frozen=True)
class Items:
    """The rows, or the columns, of a tile, which consist of several vectors each."""

    ragged: Ragged  # the items alone
    starts: Tensor  # (items + 1,), where the vectors of each start, on the device

    @classmethod
    def of(cls, items: Ragged, part: slice, device: torch.device) -> Items:
        """Return consecutive ones of some items."""
        whole = _shared(items, device)
        if part == slice(0, len(items.lengths)):
            return whole
        some = whole.starts[part.start : part.stop + 1]
        if part.start:
            some = some - some[0]
        return cls(Ragged(Partition((part.stop - part.start,)), items.lengths[part]), some)

    @property
    def vectors(self) -> int:
        """The number of vectors."""
        return self.ragged.starts[-1]

    @property
    def lengths(self) -> Tensor:
        """The number of vectors of each item, on the device."""
        return self.starts.diff()

    @cached_property
    def owners(self) -> Tensor:
        """The item of each vector."""
        with torch.inference_mode(mode=False):  # autograd may save them in a later call
            return torch.repeat_interleave(self.lengths, output_size=self.vectors)

    def add_sums_(self, into: Tensor, numbers: Tensor, part: slice) -> None:
        """Add the sum of each item's rows of `numbers`, of the vectors in `part`: in a fixed order, also on a GPU."""
        ends = self.ragged.starts
        items = slice(bisect_right(ends, part.start) - 1, bisect_left(ends, part.stop))
        offsets = (self.starts[items] - part.start).clamp_(min=0)
        into[items].add_(embedding_bag(torch.arange(len(numbers), device=offsets.device), numbers, offsets, mode="sum"))


@lru_cache(maxsize=8)
def _shared(items: Ragged, device: torch.device) -> Items:
    """Return all of some items, which calls with items of these lengths share."""
    return Items(items, shared_numbers_on(items.starts, device))


@lru_cache(maxsize=8)
def shared_numbers_on(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return integers on a device, which calls with the same ones share."""
    with torch.inference_mode(mode=False):
        return numbers_on(numbers, device)


def numbers_on(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return integers on a device; no copy waits for a GPU."""
    on_host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host.to(device)
