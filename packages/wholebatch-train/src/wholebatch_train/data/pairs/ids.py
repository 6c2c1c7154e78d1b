"""Rows with one id, by `--columns group=NAME`: each query of theirs has all their documents for right answers."""

from __future__ import annotations

import torch
from torch import Tensor

from wholebatch.app import UserError

_MOST = 10**8  # pairs, of two numbers each


def check_ids(ids: Tensor) -> None:
    """Raise UserError if so many rows (n,) have one id that `pairs_of_ids` would refuse them."""
    _count_rows(ids)


def pairs_of_ids(ids: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the places of all pairs of rows with one id, a row with itself among them, in two tensors.

    Args:
        ids: a number for each of `count` rows. None: each row has an id of its own.
        count: number of rows.

    Raises:
        UserError: so many rows have one id that their pairs would not fit into memory.

    >>> pairs_of_ids(torch.tensor([7, 5, 7]), 3)
    (tensor([1, 0, 0, 2, 2]), tensor([1, 0, 2, 0, 2]))
    """
    if ids is None:
        return torch.arange(count), torch.arange(count)
    sizes = _count_rows(ids)
    order = ids.argsort(stable=True)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # in `order`: of each row, where its id begins
    many = sizes.repeat_interleave(sizes)
    within = torch.arange(int(many.sum())) - (many.cumsum(0) - many).repeat_interleave(many)
    return order.repeat_interleave(many), order[first.repeat_interleave(many) + within]


def _count_rows(ids: Tensor) -> Tensor:
    """Return the number of rows of each id."""
    _, sizes = torch.unique(ids, return_counts=True)
    if int(sizes.double().square().sum()) > _MOST:
        raise UserError(
            f"--columns group: {int(sizes.max()):,} rows have one value, and all would be right answers of each other; "
            "expected the ids of single things, not of classes (--task identify learns classes)"
        )
    return sizes
