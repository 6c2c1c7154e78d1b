"""What a loss can say about the batch besides its value: made of numbers that its sweep collects in passing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Communicator
from ._softmax import Numbers


@dataclass(frozen=True)
class BatchStatistics:
    """Means over all softmaxes of the global batch: scalars without gradient, the same on all ranks.

    Attributes:
        accuracy: how often the (mean) positive is more similar than every negative.
        positive_similarity: mean similarity of positives, in the units of x . y.
        hardest_negative_similarity: mean over rows of their most similar negative.
        effective_negatives: mean over rows of (sum_j p_j)^2 / sum_j p_j^2 over the negatives, p the softmax: as many
            equally hard ones would weigh the same.
        temperature: 1 / scale.

    The first two are means over rows with a positive (without a negative, it counts as more similar than all), the next
    two over rows with a negative; where there is none, the mean is NaN.
    """

    accuracy: Tensor
    positive_similarity: Tensor
    hardest_negative_similarity: Tensor
    effective_negatives: Tensor
    temperature: Tensor


@torch.no_grad()
def batch_statistics(comm: Communicator, scale: float, sides: Sequence[tuple[Numbers, Tensor]]) -> BatchStatistics:
    """Of sides, each with the logits of its rows' (mean) positives, NaN where there are none. One all-reduce."""
    sums = []
    for side, target in sides:
        assert side.largest is not None
        assert side.effective is not None
        has_positive, has_negative = ~target.isnan(), ~side.largest.isneginf()
        for values, where in (
            ((target > side.largest).to(target), has_positive),
            (target / scale, has_positive),
            (side.largest / scale, has_negative),
            (side.effective, has_negative),
        ):
            sums.append(torch.stack([torch.where(where, values, 0.0).sum(), where.sum().to(values)]))
    totals = comm.all_reduce(torch.stack(sums).unflatten(0, (len(sides), 4)).sum(0), check=False)
    accuracy, positive, hardest, effective = (totals[:, 0] / totals[:, 1]).unbind()
    return BatchStatistics(accuracy, positive, hardest, effective, torch.full_like(accuracy, 1 / scale))
