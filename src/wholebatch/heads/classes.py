"""The classes whose centers a rank holds: consecutive classes, or a sample of them by their ids."""

from __future__ import annotations

import torch
from torch import Tensor

from .._base.checksum import checksum
from .._base.precision import part_size
from ..comm import Communicator, Group, select_communicator
from ..comm.records import FactsByRank

NOT_HERE = -1
PART = "checksum of the centers"  # the fact of a rank, from `part_checksum`
_ROWS = 32  # at least so many centers are read for it, all over the part


def rows_of(labels: Tensor, local: slice, ids: Tensor | None) -> Tensor:
    """Return the row of each label's center among the local centers, or NOT_HERE; in the shape of the labels.

    Without ids, (C_r,) and ascending, these are the centers of the consecutive classes `local`.
    """
    if ids is None:
        return rows_within(labels, local)
    ids = ids.to(labels)
    if not len(ids):
        return torch.full_like(labels, NOT_HERE)
    index = torch.searchsorted(ids, labels).clamp_(max=len(ids) - 1)
    return torch.where(ids[index] == labels, index, NOT_HERE)


def check_complete(comm: Communicator, caller: str, rows: Tensor, counts: Tensor | None) -> None:
    """Raise ValueError, on every rank, unless one rank holds the class of each label. Collective: one all-reduce.

    `rows` are those of the labels' centers, from `rows_of`; `counts`: whether each label counts, None: all do.
    """
    rows = rows.flatten() if counts is None else rows[counts]
    owners = comm.all_reduce((rows != NOT_HERE).to(torch.int64), check=False)
    wrong = (owners != 1).nonzero()
    if len(wrong):
        raise ValueError(
            f"{caller}: each label's class must be among class_ids of one rank; for {len(wrong)} of "
            f"{len(owners)} labels {int(owners[wrong[0]])} ranks have it. Add each label's class to the sample"
        )


def rows_within(labels: Tensor, local: slice) -> Tensor:
    """Return the place of each label among the consecutive classes `local`, or NOT_HERE; in the shape of the labels."""
    return torch.where((labels >= local.start) & (labels < local.stop), labels - local.start, NOT_HERE)


def rows_of_groups(rows: Tensor, size: int) -> Tensor:
    """Return the rows of the `size` sub-centers of each class, (B, k, size), from the rows of the classes, (B, k).

    A class on another rank is NOT_HERE, and so are its sub-centers.

    >>> rows_of_groups(torch.tensor([[2, -1]]), 2)
    tensor([[[ 4,  5],
             [-1, -1]]])
    """
    if size == 1:
        return rows[..., None]
    each = size * rows[..., None] + torch.arange(size, device=rows.device)
    return torch.where(rows[..., None] == NOT_HERE, NOT_HERE, each)


def out_of_order(ids: Tensor) -> Tensor:
    """Return the number of ids that are not larger than the one before, shape ()."""
    return (ids[1:] <= ids[:-1]).sum()


def check_ascending(wrong: float) -> None:
    """Raise ValueError if any ids of classes are out of order."""
    if wrong:
        raise ValueError(
            f"class_ids must be ascending, each id once, got {wrong:.0f} out of order; sort them, and the centers alike"
        )


def label_numbers(labels: Tensor, ignore_index: int) -> dict[str, Tensor | float]:
    """Return the number of labels, of those that count, and the ends of a range with these and 0: all ids of classes.

    The range has 0 instead of labels that do not count, and tells as well whether another is no id of a class.
    """
    labels = labels.to(torch.int64)
    counts = labels != ignore_index
    smallest, largest = (labels * counts).aminmax() if labels.numel() else (0.0, 0.0)
    return {"labels": labels.numel(), "that count": counts.sum(), "smallest": smallest, "largest": largest}


def check_enough_classes(num_classes: int, size: int) -> None:
    """Raise ValueError unless each rank has a class."""
    if num_classes < size:
        raise ValueError(
            f"num_classes must be at least {size}, a class for each of the {size} ranks, got "
            f"num_classes={num_classes}; use fewer ranks in group"
        )


@torch.no_grad()
def part_checksum(centers: Tensor, group: Group) -> Tensor | float:
    """Return the checksum of this rank's part, shape (), float64; -1 where all centers are equal, as they may begin."""
    if select_communicator(group).size == 1 or not len(centers):
        return -1.0
    rows = centers[:: max(1, len(centers) // part_size("checked centers", _ROWS))].flatten(1)
    constant = (rows == (rows[:1] if len(rows) > 1 else rows[:, :1])).all()
    return torch.where(constant, -1.0, (checksum(rows) >> 11).abs().to(torch.float64))  # which holds 53 bits exactly


def check_parts(caller: str, by_rank: FactsByRank) -> None:
    """Raise ValueError, on every rank, if two ranks hold the same part: a step has taken the parts for copies.

    ZeroRedundancyOptimizer, another broadcast of parameters, or an average of them leave no other trace.
    """
    parts = [part for part in by_rank.column(PART) if part >= 0]
    if len({*parts}) < len(parts):
        equal = [rank for rank, part in enumerate(by_rank.column(PART)) if parts.count(part) > 1]
        raise ValueError(
            f"{caller}: each rank must hold the centers of other classes, got equal ones on ranks {equal}: "
            "ZeroRedundancyOptimizer, or another broadcast or average of parameters, has overwritten them, or each "
            "rank has drawn them from one seed. Leave head.parameters() out of it, and create the head again, or load "
            "it by wholebatch.heads.load_head"
        )
