"""Columns of a trainer's batch (positives, negatives, ...) as the documents of one call of late interaction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Return the rows of all columns, (rows, longest, ...), after one another; shorter columns end with zeros."""
    longest = max(x.shape[1] for x in columns)
    return torch.cat([pad(x, (*[0, 0] * (x.dim() - 2), 0, longest - x.shape[1])) for x in columns])
