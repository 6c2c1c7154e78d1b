"""Pairs of two sides, grouped and split, and batches that are a function of (seed, step) alone.

Rows that share a text, a picture or a value of the column `group`, directly or through others, are one group. A pass
over the data visits each group once, with one of its rows chosen at random, so that no text and no picture is a false
negative of itself within a batch, on whatever rank the two rows are. The batch of a step depends only on the seed and
the step, so it is the same on any number of ranks and after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wholebatch.app import UserError

from .pictures import LeftOut, first_of_each
from .randomness import seeded
from .sides import Side

if TYPE_CHECKING:
    from .from_table import Negatives


_MOST = 10**8  # pairs, of two numbers each


@dataclass(frozen=True)
class Pairs:
    """Rows of two sides in groups: `order[first[g] : first[g + 1]]` are the rows of group g."""

    sides: Mapping[str, Side]
    """The two sides by name, such as image and text: row i of one belongs to row i of the other."""
    order: Tensor
    """int64, (number of rows,)."""
    first: Tensor
    """int64, (number of groups + 1,)."""
    digest: str = ""
    """A hash of the data, equal on ranks that see the same."""
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """By side a number for each of its rows, (n,), equal for equal items. Of a side without them no two are equal."""
    negatives: Negatives | None = None
    """Mined negatives of each row."""
    ids: Tensor | None = None
    """A number for each row of the sides, by `--columns group=NAME`: rows with an equal one are positives of each
    other. Rows of a group may differ in it, where they share a text or a picture."""
    tested: Tensor | None = None
    """The rows that validation and test may use. None: all."""
    left_out: tuple[LeftOut, ...] = ()
    """The rows that `--skip-bad` has left out."""

    @property
    def common(self) -> str:
        """The values of which rows of a group have an equal one, in words.

        >>> Pairs.grouped({"image": None, "text": None}, torch.tensor([0, 1])).common
        'a text or a picture'
        """
        kinds = ["a text", *["a picture"] * ("image" in self.sides)]
        kinds += [] if self.ids is None else ["a value of the column for group"]
        *most, last = kinds
        return f"{', '.join(most)} or {last}" if most else last

    @classmethod
    def grouped(cls, sides: Mapping[str, Side], group: Tensor, *, rows: Tensor | None = None, **facts: Any) -> Pairs:
        """Group rows by the numbers (n,) of their groups, which get new numbers in the order of their first rows.

        Rows of a group keep their order. The `facts` are further fields of the result.

        >>> Pairs.grouped({}, torch.tensor([4, 2, 4])).first
        tensor([0, 2, 3])
        """
        _, owner = _distinct(group, torch.arange(len(group)))
        sizes = torch.bincount(owner)
        first = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        order = torch.argsort(owner, stable=True)
        return cls(sides, order if rows is None else rows[order], first, **facts)

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def summary(self) -> str:
        """The numbers of the data, in words."""
        return f"{len(self.order)} pairs in {len(self)} groups"

    @property
    def names(self) -> tuple[str, str]:
        first, second = self.sides
        return first, second

    @cached_property
    def group_of(self) -> Tensor:
        """The group of each row of the sides, (number of their rows,); -1 for rows that are left out."""
        groups = torch.full((int(self.order.max()) + 1,), -1)
        groups[self.order] = torch.repeat_interleave(torch.arange(len(self)), self.first.diff())
        return groups

    def rows(self, groups: Tensor) -> Tensor:
        """Return the first row of each of these groups."""
        return self.order[self.first[groups]]


def joined(numbers: Sequence[Tensor]) -> Tensor:
    """Return the number of a group for each row, (n,): rows with an equal number in any of the columns are one group.

    Each column of numbers joins the groups that share a number, until no column joins any: Shiloach and Vishkin, 1982,
    J. Algorithms 3(1), in a number of rounds that grows with the logarithm of the longest chain.

    >>> joined([torch.tensor([0, 1, 1, 2]), torch.tensor([5, 5, 6, 7])])
    tensor([0, 0, 0, 3])
    """
    n = len(numbers[0])
    columns = [torch.unique(column, return_inverse=True)[1] for column in numbers]
    label = torch.arange(n)  # of each row: a row of its group, at first itself
    while True:
        before = label
        for column in columns:
            least = torch.full((n,), n).scatter_reduce(0, column, label, "amin")[column]
            label = label.scatter_reduce(0, label, least, "amin")  # the whole group of a row takes the smaller label
            while not torch.equal(label[label], label):
                label = label[label]
        if torch.equal(label, before):
            return label


def joined_across(first: Tensor, second: Tensor) -> Tensor:
    """Return the number of a group for each row, (n,): of rows that share a number, on the same or on another side.

    >>> joined_across(torch.tensor([0, 1, 2]), torch.tensor([1, 3, 4]))
    tensor([0, 0, 2])
    """
    rows = torch.arange(len(first))
    return joined([torch.cat([first, second]), torch.cat([rows, rows])])[: len(first)]


@dataclass(frozen=True)
class Split:
    """Numbers of groups in three disjoint parts."""

    train: Tensor
    validation: Tensor
    test: Tensor


def split_groups(pairs: Pairs, *, validation: int, test: int, seed: int) -> Split:
    """Split the groups at random. No text and no picture is in two parts: retrieval is tested on pairs never seen."""
    order = torch.randperm(len(pairs), generator=seeded(seed, "split"))
    return Split(
        train=order[validation + test :],
        validation=order[test : test + validation].sort().values,
        test=order[:test].sort().values,
    )


class Order:
    """The order of numbers in each pass; the last pass is kept, because its permutation is needed in every step."""

    def __init__(self, numbers: Tensor, *, batch_size: int, seed: int) -> None:
        self._numbers, self._batch_size, self._seed = numbers, batch_size, seed
        self._pass: tuple[int, Tensor] | None = None

    def batch(self, step: int) -> Tensor:
        """Return the numbers of the step's global batch; a pass leaves out its incomplete last batch."""
        passed, position = divmod(step, len(self._numbers) // self._batch_size)
        if self._pass is None or self._pass[0] != passed:
            self._pass = passed, torch.randperm(len(self._numbers), generator=seeded(self._seed, "order", passed))
        return self._numbers[self._pass[1][position * self._batch_size : (position + 1) * self._batch_size]]


def batch_of_step(order: Order, pairs: Pairs, *, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return (rows, groups) of the step's global batch."""
    groups = order.batch(step)
    choice = torch.rand(len(groups), generator=seeded(seed, "image", step), dtype=torch.float64)
    first, count = pairs.first[groups], pairs.first[groups + 1] - pairs.first[groups]
    return pairs.order[first + (choice * count).long()], groups


def pairs_of_ids(ids: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the places of all pairs of rows with one id, a row with itself among them; None: each has one of its own.

    >>> pairs_of_ids(torch.tensor([7, 5, 7]), 3)
    (tensor([1, 0, 0, 2, 2]), tensor([1, 0, 2, 0, 2]))
    """
    if ids is None:
        return torch.arange(count), torch.arange(count)
    sizes = rows_of_ids(ids)
    order = ids.argsort(stable=True)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # in `order`: of each row, where its id begins
    many = sizes.repeat_interleave(sizes)
    within = torch.arange(int(many.sum())) - (many.cumsum(0) - many).repeat_interleave(many)
    return order.repeat_interleave(many), order[first.repeat_interleave(many) + within]


def rows_of_ids(ids: Tensor) -> Tensor:
    """Return the number of rows of each id; UserError if one has so many that `pairs_of_ids` would not fit."""
    _, sizes = torch.unique(ids, return_counts=True)
    if int(sizes.double().square().sum()) > _MOST:
        raise UserError(
            f"--columns group: {int(sizes.max()):,} rows have one value, and all would be right answers of each other; "
            "expected the ids of single things, not of classes (--task identify learns classes)"
        )
    return sizes


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
    (first, first_places), (second, second_places) = (_distinct(pairs.numbers.get(name), rows) for name in pairs.names)
    first_rows, second_rows = pairs_of_ids(None if pairs.ids is None else pairs.ids[rows], len(rows))
    keys = torch.unique(first_places[first_rows] * len(second) + second_places[second_rows])
    right = torch.stack([keys // max(1, len(second)), keys % max(1, len(second))])
    return Stated((rows[first], rows[second]), right)


def stated_of_groups(pairs: Pairs, groups: Tensor) -> Stated:
    """Return the distinct items and their pairs of all rows of these groups that may be tested."""
    rows = torch.isin(pairs.group_of, groups).nonzero()[:, 0]
    return stated_pairs(pairs, rows if pairs.tested is None else rows[torch.isin(rows, pairs.tested)])


def other_items(pairs: Pairs, rows: Tensor) -> Tensor:
    """Return a row of each distinct item of the second side that none of these rows has, in the order of the data."""
    numbers, ordered_rows = pairs.numbers[pairs.names[1]], pairs.order.sort().values
    everything = ordered_rows[_distinct(numbers, ordered_rows)[0]]
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
