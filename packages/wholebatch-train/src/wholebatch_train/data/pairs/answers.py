"""The pairs that the data state, of distinct items: the right answers of a search.

An item that repeats, such as a picture with five captions, is one item with five right answers; rows with an equal
value of the column `group` are right answers of each other. Rows that are in one group through others are not: the
group only keeps them on one side of the split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..pictures.equal import first_of_each
from .pairs import Pairs, pairs_of_ids


class Stated(NamedTuple):
    """Distinct items of both sides, and which of them the data pair."""

    rows: tuple[Tensor, Tensor]
    """For each side a row of each distinct item, in the order of the data."""
    right: Tensor
    """int64, (2, number of pairs): places in the two tensors of `rows`, in ascending order, each pair once."""

    @property
    def back(self) -> Tensor:
        """The same pairs for a search from the second side to the first, in the same form."""
        return self.right.flip(0)[:, self.right[1].argsort(stable=True)].contiguous()


def stated_pairs(pairs: Pairs, rows: Tensor) -> Stated:
    """Return the distinct items of these rows (n,) and their pairs.

    >>> numbers = {"query": torch.tensor([5, 5, 7]), "document": torch.tensor([1, 2, 2])}
    >>> stated_pairs(Pairs.grouped({"query": None, "document": None}, torch.zeros(3), numbers=numbers), torch.arange(3))
    Stated(rows=(tensor([0, 2]), tensor([0, 1])), right=tensor([[0, 0, 1],
            [0, 1, 1]]))
    """
    rows = rows.sort().values
    (first, of_first), (second, of_second) = (_distinct(pairs.numbers.get(name), rows) for name in pairs.names)
    first_rows, second_rows = pairs_of_ids(None if pairs.ids is None else pairs.ids[rows], len(rows))
    keys = torch.unique(of_first[first_rows] * len(second) + of_second[second_rows])
    right = torch.stack([keys // max(1, len(second)), keys % max(1, len(second))])
    return Stated((rows[first], rows[second]), right)


def stated_of_groups(pairs: Pairs, groups: Tensor) -> Stated:
    """Return the distinct items and their pairs of all rows of these groups that may be tested."""
    rows = torch.isin(pairs.group_of, groups).nonzero()[:, 0]
    return stated_pairs(pairs, rows if pairs.tested is None else rows[torch.isin(rows, pairs.tested)])


def other_items(pairs: Pairs, rows: Tensor) -> Tensor:
    """Return a row of each distinct item of the second side that none of these rows has, in the order of the data."""
    numbers, of_order = pairs.numbers[pairs.names[1]], pairs.order.sort().values
    everything = of_order[_distinct(numbers, of_order)[0]]
    return everything[~torch.isin(numbers[everything], numbers[rows])]


def _distinct(numbers: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place in `rows` of each distinct item's first row, and for each row the place of its item there."""
    if numbers is None:
        return torch.arange(len(rows)), torch.arange(len(rows))
    _, item = torch.unique(numbers[rows], return_inverse=True)
    if not len(item):
        return item, item
    first = first_of_each(item)
    order = first.argsort()
    return first[order], order.argsort()[item]
