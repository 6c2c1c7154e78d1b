"""How evenly rows cover the sphere: the mean of a Gaussian of their distances.

    U = log mean over i of mean over j != i of exp(-t |x_i - x_j|^2)

The logarithm is one of the whole mean, so it is taken of the loss: `uniformity()(x).log()`.

Source: Wang and Isola, 2020, arXiv:2005.10242. With alignment beside it: :class:`wholebatch.AlignmentUniformityLoss`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.settings import check_positive_number
from ..pair_loss import PairLoss
from ..terms import Mean, other


def uniformity(*, t: float = 2.0, **options: Any) -> PairLoss:  # of PairLoss
    """Return the mean of exp(-t |x_i - x_j|^2) over pairs of different rows; take its logarithm.

    Args:
        t: how near two rows must be to count, > 0.
        **options: group, sync, exchange, memory, reduction, precision of :class:`wholebatch.PairLoss`.

    Returns:
        A loss of (x), rows of length 1.

    Raises:
        ValueError: for a t that is not positive.

    >>> import torch, wholebatch as wb
    >>> wb.recipes.uniformity()(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).log()
    tensor(-8.)
    """
    t = check_positive_number("t", t, "it multiplies squared distances")
    return PairLoss(
        {"near": Mean(_gaussian, where=other)},
        _near,
        similarity="neg_squared_distance",
        symmetric=True,
        parameters={"t": t},
        **options,
    )


def _gaussian(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    return torch.exp(p.t * s)


def _near(r: Any, x: Any, p: Any) -> Tensor:  # fields
    near: Tensor = r.near
    return near
