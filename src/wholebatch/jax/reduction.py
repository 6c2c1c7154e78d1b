"""From the statistics of rows to their cross-entropies, and from these to one number for all devices."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array

from .axis import Axis
from .softmax import RowStatistics

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(statistics: RowStatistics, label_smoothing: float = 0.0) -> Array:
    """Return each row's logsumexp minus its mean positive logit; 0 for a row without positives.

    With label smoothing e the mean positive logit has weight 1 - e, and the mean of all logits weight e.
    """
    assert statistics.positives is not None
    num = jnp.ones_like(statistics.lse) if statistics.num_positives is None else statistics.num_positives
    target = statistics.positives / jnp.maximum(num, 1)
    if statistics.all_logits is not None and statistics.num is not None:
        uniform = statistics.all_logits / jnp.maximum(statistics.num, 1)
        target = (1 - label_smoothing) * target + label_smoothing * uniform
    counts = num > 0
    return jnp.where(counts, jnp.where(counts, statistics.lse, 0) - target, 0)


def reduce_losses(
    axis: Axis, losses: Array, weights: Array | None, counted: Array | None, reduction: Reduction
) -> Array:
    """Reduce this device's losses, (b, ...), to the weighted mean or sum over all devices, or only weigh them.

    Losses that do not count, and their weights, are 0. Without weights each is 1, and without `counted` all count.
    """
    weights = jnp.ones_like(losses) if weights is None else weights.astype(losses.dtype)
    if counted is not None:
        losses, weights = jnp.where(counted, losses, 0), jnp.where(counted, weights, 0)
    losses = weights * losses
    if reduction == "none":
        return losses
    total = axis.sum(losses.sum())
    return total if reduction == "sum" else weighted_mean(axis, total, weights)


def weighted_mean(axis: Axis, total: Array, weights: Array) -> Array:
    """Divide a sum over all devices by the sum of all devices' weights; 0 stays 0 where no weight is positive."""
    total_weight = axis.sum(weights.sum())
    return total / jnp.where(total_weight == 0, 1, total_weight)
