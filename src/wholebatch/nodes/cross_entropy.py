"""Cross-entropy of a row from its statistics: O(B) arithmetic, in float64.

With p = softmax over row i's candidates and A, T, M as in `sweep.softmax`,

    one positive, A over the negatives      -log p_i = log(exp A + exp T) - T = softplus(A - T)
    n positives, A over all candidates      -1/n sum_p log p_p = A - T / n
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..logsumexp import softplus
from .row_statistics import RowStatistics


def one_positive(side: RowStatistics, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of each row's one positive, with logit `target`, against the negatives, (n,)."""
    loss = softplus(side.logsumexp - target)
    return loss if not label_smoothing else loss + label_smoothing * (target - mean_logit([side], target))


def mean_logit(sides: Sequence[RowStatistics], target: Tensor, copies: int = 1) -> Tensor:
    """Return the mean logit of each row, (n,), over the negatives of all sides and `copies` copies of the positive."""
    logits = torch.stack([side.logits for side in sides if side.logits is not None]).sum(0)
    count = torch.stack([side.count for side in sides if side.count is not None]).sum(0)
    return (logits + copies * target) / (count + copies)


def many_positives(side: RowStatistics, positives: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of each row's positives among all candidates, (n,); 0 where it has none.

    The statistics are those over all candidates; the label smoothing is the weight of their mean.
    """
    assert side.target is not None
    mean = side.target / positives.clamp(min=1)
    if label_smoothing:
        assert side.logits is not None
        assert side.count is not None
        mean = (1 - label_smoothing) * mean + label_smoothing * side.logits / side.count.clamp(min=1)
    return torch.where(positives > 0, side.logsumexp - mean, 0.0)


def how_many_equal(ids: Tensor, among: Tensor) -> Tensor:
    """Return the number of ids in `among`, (n,), that equal each of `ids`, (b,): integers, (b,)."""
    ordered, ids = among.sort().values, ids.contiguous()
    return torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)
