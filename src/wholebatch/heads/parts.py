"""The parts of a head are centers of different classes: equal parts on two ranks are one rank's part, copied.

An optimizer that shares the work of a step, such as ZeroRedundancyOptimizer, any other broadcast of parameters, and an
average of them take the parts for copies of one parameter, and leave no other trace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checksum import checksum
from ..comm.facts_by_rank import FactsByRank

PART = "checksum of the centers"  # the fact of a rank, from `part_checksum`
_ROWS = 32  # at least this many centers are read, all over the part
_NOT_COMPARED = -1.0


@torch.no_grad()
def part_checksum(centers: Tensor, size: int) -> Tensor:
    """Return the checksum of this rank's part among `size` ranks, shape (), float64.

    A part of one center many times is not compared: without labels in a step, centers that began equal stay so.
    """
    if size == 1 or not len(centers):
        return torch.full((), _NOT_COMPARED, dtype=torch.float64, device="cpu")
    rows = centers[:: max(1, len(centers) // _ROWS)].flatten(1)
    constant = (rows == (rows[:1] if len(rows) > 1 else rows[:, :1])).all()
    return torch.where(constant, _NOT_COMPARED, (checksum(rows) >> 11).to(torch.float64))  # 53 bits are exact


def check_parts(caller: str, by_rank: FactsByRank) -> None:
    """Raise ValueError, on every rank, if two ranks have sent the same checksum."""
    parts = by_rank.column(PART)
    compared = [part for part in parts if part != _NOT_COMPARED]
    if len({*compared}) < len(compared):
        first, *others = (rank for rank, part in enumerate(parts) if compared.count(part) > 1)
        raise ValueError(
            f"{caller}: each rank must hold the centers of other classes, got equal centers on ranks {first} and "
            f"{', '.join(map(str, others))}: ZeroRedundancyOptimizer, or another broadcast or average of parameters, "
            "has overwritten them, or each rank has drawn them from one seed. Leave head.parameters() out of it, and "
            "create the head again, or load it by wholebatch.heads.load_head"
        )
