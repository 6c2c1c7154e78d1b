"""Two views of each example, against themselves: what SimCLR, DCL and their relatives have in common.

    Z = normalize([Z0; Z1]) of all ranks,    S = Z Z^T / temperature without its diagonal

S is symmetric: the tiles above its diagonal say all, and the work is half of a full sweep's.
"""

from __future__ import annotations

from typing import Any

import torch

from .._normalize import UNIT
from ..partition import Diagonal, Partition
from ..sweep import Diagonals, EqualIds, Pairs, Selection
from ._door import Agreement
from ._softmax import Numbers, softmax_numbers, wanted
from ._towers import Towers


def two_views(
    agreed: Agreement,
    *,
    statistics: bool = False,
    beside_target: bool = True,
    sharper: float = 1.0,
    narrow: bool = False,
) -> Numbers:
    """The numbers of this rank's rows of Z, those of z0 first: one positive each, and A over the negatives.

    Args:
        agreed: on "z0", "z1", a "temperature", and perhaps "ids": examples with equal ids are no negatives.
        statistics: whether they are wanted.
        beside_target: whether the loss adds the positive's exponential to the negatives'.
        sharper: multiplies S.
        narrow: as in `softmax_numbers`.
    """
    examples = agreed.rows["z0"]
    rows = Partition(tuple(2 * count for count in examples.counts))
    local, b = rows.rows(agreed.rank), examples.counts[agreed.rank]
    matching = Diagonals(Diagonal(0, local.start + b, b), Diagonal(b, local.start, b))
    itself = Diagonals(Diagonal(0, local.start, 2 * b))
    excluded: Any = itself
    if "ids" in agreed.vectors:
        ids = torch.cat([part.repeat(2) for part in agreed.ids("ids").split(examples.counts)])
        excluded = EqualIds(ids[local], ids, but=matching)
    numbers, _ = softmax_numbers(
        agreed,
        (sharper / agreed.scalars["temperature"], sharper / agreed.inputs["temperature"]),
        [agreed.inputs["z0"], agreed.inputs["z1"]],
        towers=Towers(stays=(0, 1), normalize=True),
        stays=rows,
        travels=rows,
        selection=Selection(Pairs(matching, excluded)),
        bound=UNIT,
        rows=wanted(statistics=statistics),
        symmetric=True,
        beside_target=beside_target,
        narrow=narrow,
    )
    assert numbers is not None
    return numbers
