"""The plan of one call of the nested node, which its forward and its backward pass share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..sweep import KernelNestedSweep, NestedSweep, Pairs
from .route import Route


@dataclass(frozen=True)
class Parts:
    """The nested matrices of one call."""

    dims: tuple[int, ...]  # m_l, the number of leading features of each part, increasing
    pairs: Pairs  # the positives and the excluded entries, the same for all parts
    bound: float  # upper bound of the similarities of all parts
    symmetric: bool  # whether columns have statistics as well
    normalize: bool  # whether each part of a row is divided by its norm


@dataclass(frozen=True)
class NestedPlan:
    """The facts that the forward and the backward pass of one call share."""

    route: Route  # the exchange of Y's rows, and the memory of tiles
    parts: Parts  # the nested matrices
    scale: float  # of S
    shift: float  # of exponentials
    size: int  # N, the size of the batch
    # kernel_dtype: of the features as they were given, where kernels compute the tiles; None: plain PyTorch does
    kernel_dtype: torch.dtype | None

    def sweep(self, x: Tensor, inverse: Tensor) -> NestedSweep:
        """Return a sweep of X's rows, with the inverse norms of their parts."""
        driver = self.route.driver(x, 1.0)
        arguments = (driver, self.parts.pairs, self.parts.dims, inverse, self.scale, self.shift)
        if self.kernel_dtype is not None:
            return KernelNestedSweep(*arguments, self.route.exchange.columns.total, self.kernel_dtype)
        return NestedSweep(*arguments)
