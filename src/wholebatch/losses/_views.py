"""Two views of each example, each row against all others: the common part of NT-Xent, DCL and the debiased loss.

    Z = normalize([Z0; Z1]) of all ranks,    S = Z Z^T / temperature without its diagonal

S is symmetric: the tiles above its diagonal suffice, and the work is half of a full sweep's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.normalize import UNIT
from ..contract import Facts, Inputs
from ..nodes import (
    Bounds,
    Layout,
    Operands,
    RowStatistics,
    Scale,
    Towers,
    row_statistics,
    statistics_fields,
    view_losses,
)
from ..partition import Diagonal, Partition
from ..sweep import Diagonals, EqualIds, Pairs, Selection

_TOWERS = Towers(stays=(0, 1), normalize=True)


def two_views_inputs(
    z0: Tensor, z1: Tensor, *, temperature: Tensor | float, ids: Tensor | None = None, weights: Tensor | None
) -> Inputs:
    """Return the inputs of a loss of two views: "z0", "z1", "temperature", and if given "ids" and "weights"."""
    return Inputs(
        features={"z0": z0, "z1": z1},
        scalars={"temperature": temperature},
        ids={"ids": (ids, "z0")},
        weights=(weights, "z0"),
        positive=("temperature",),
        paired=("z0", "z1"),
        normalized=True,
    )


def two_view_features(z0: Tensor, z1: Tensor) -> Inputs:
    """Return the inputs of a loss of two views that has no other tensors: "z0" and "z1"."""
    return Inputs(features={"z0": z0, "z1": z1}, paired=("z0", "z1"), normalized=True)


def two_views(facts: Facts, *, add_positive: bool = True, sharper: float = 1.0, narrow: bool = False) -> RowStatistics:
    """Return the statistics of this rank's rows of Z, z0's first: T of the one positive, and A over the negatives.

    Examples with equal ids are not negatives. S is multiplied by `sharper`.
    """
    call = _call(facts, add_positive=add_positive, sharper=sharper, narrow=narrow)
    side, _ = row_statistics(*call, rows=statistics_fields(statistics=facts.statistics))
    assert side is not None
    return side


def two_view_losses(facts: Facts) -> Tensor:
    """Return the mean cross-entropy of both views of each of this rank's examples, (b,), as for `two_views`."""
    return view_losses(*_call(facts))


def _call(
    facts: Facts, *, add_positive: bool = True, sharper: float = 1.0, narrow: bool = False
) -> tuple[Facts, Scale, Operands, Selection, Bounds]:
    examples = facts.rows["z0"]
    has_ids = "ids" in facts.vectors

    def select() -> Selection:
        local, b = layout.rows.rows(facts.rank), examples.counts[facts.rank]
        matching = Diagonals(Diagonal(0, local.start + b, b), Diagonal(b, local.start, b))
        excluded: Any = Diagonals(Diagonal(0, local.start, 2 * b))  # each row itself
        if has_ids:
            ids = torch.cat([part.repeat(2) for part in facts.all_ids("ids").split(examples.counts)])
            excluded = EqualIds(ids[local], ids, but=matching)
        return Selection(Pairs(matching, excluded))

    def both_views() -> Layout:
        rows = Partition(tuple(2 * count for count in examples.counts))
        return Layout(rows, rows, symmetric=True)

    layout = facts.once("layout", both_views)
    return (
        facts,
        (sharper / facts.scalars["temperature"], sharper / facts.inputs["temperature"]),
        Operands([facts.inputs["z0"], facts.inputs["z1"]], _TOWERS, layout, narrow=narrow),
        select() if has_ids else facts.once("selection", select),
        Bounds(UNIT, add_positive=float(add_positive)),
    )
