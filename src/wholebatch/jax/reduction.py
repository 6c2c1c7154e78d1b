"""From the statistics of rows to their cross-entropies, and from these to one number of all devices."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array

from .axis import Axis
from .softmax import Statistics

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(of: Statistics, label_smoothing: float = 0.0) -> Array:
    """Of each row: the logsumexp less the mean positive; 0 for a row without positives.

    With label smoothing e that mean counts for 1 - e, and the mean of all logits for e.
    """
    assert of.positives is not None
    assert of.num_positives is not None
    target = of.positives / jnp.maximum(of.num_positives, 1)
    if of.all_logits is not None and of.num is not None:
        target = (1 - label_smoothing) * target + label_smoothing * of.all_logits / jnp.maximum(of.num, 1)
    counts = of.num_positives > 0
    return jnp.where(counts, jnp.where(counts, of.lse, 0) - target, 0)


def reduced(axis: Axis, losses: Array, weights: Array | None, counted: Array | None, reduction: Reduction) -> Array:
    """Of this device's losses, (b, ...): their weighted mean or sum over all devices, or each times its weight.

    Args:
        axis: over which the batch is split.
        losses: L_i.
        weights: of the same shape; None: 1.
        counted: which of them there are; None: all.
        reduction: the mean is sum w_i L_i / sum w_i, and 0 where no weight is positive.
    """
    weights = jnp.ones_like(losses) if weights is None else weights.astype(losses.dtype)
    if counted is not None:
        losses, weights = jnp.where(counted, losses, 0), jnp.where(counted, weights, 0)
    losses = weights * losses
    if reduction == "none":
        return losses
    total = axis.sum(losses.sum())
    return total if reduction == "sum" else mean_of(axis, total, weights)


def mean_of(axis: Axis, total: Array, weights: Array) -> Array:
    """Of a sum over all devices, given this one's weights; 0 stays 0 where no weight is positive."""
    of_weights = axis.sum(weights.sum())
    return total / jnp.where(of_weights == 0, 1, of_weights)
