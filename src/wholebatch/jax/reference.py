"""Dense reference implementations of all losses of wholebatch.jax, on one device: whole batch, whole matrix.

Each is short enough to be compared with its paper by eye, and is differentiated by JAX. Arguments mean the same as in
the losses, and are not checked, except for labels; everything is computed in their dtype. :mod:`wholebatch.reference`
is the same for PyTorch, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from . import checks
from .margins import ArcFace, Margin
from .products import angles_between, moderate, norms

__all__ = ["clip_loss", "info_nce_loss", "nt_xent_loss", "partial_fc_loss", "siglip_loss", "sup_con_loss"]


def clip_loss(
    image_features: Array,
    text_features: Array,
    logit_scale: Array | float,
    *,
    ids: Array | None = None,
    equal_ids: str = "positive",
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Array:
    """Symmetric cross-entropy between images and texts (Radford et al., 2021, arXiv:2103.00020, figure 3).

    S = logit_scale * X Y^T,    L = (CE(S, diagonal) + CE(S^T, diagonal)) / 2

    With ids, the targets are all pairs of equal ids (Yang et al., 2022, arXiv:2204.03610, equation 3).

    >>> print(f"{clip_loss(jnp.eye(3), jnp.eye(3), 10.0):.1e}")
    9.1e-05
    """
    logits = logit_scale * image_features @ text_features.T
    positive, excluded = _pairs(len(logits), ids, equal_ids)
    rows = _cross_entropy(logits, positive, excluded, label_smoothing)
    cols = _cross_entropy(logits.T, positive, excluded, label_smoothing)
    return _reduce((rows + cols) / 2, weights, reduction)


def info_nce_loss(
    queries: Array,
    keys: Array,
    *,
    logit_scale: Array | float,
    negatives: Array | None = None,
    hard_negatives: Array | None = None,
    query_ids: Array | None = None,
    key_ids: Array | None = None,
    negative_ids: Array | None = None,
    hard_negative_ids: Array | None = None,
    directions: Sequence[str] | str = ("query_to_key",),
    partition: str = "joint",
    label_smoothing: float = 0.0,
    weights: Array | None = None,
    reduction: str = "mean",
) -> Array:
    """Cross-entropy of each query's key among all keys and negatives (van den Oord et al., 2018, arXiv:1807.03748,
    equation 4).

    S = logit_scale * Q [K; N]^T,    L = CE(S, i)

    >>> print(f"{info_nce_loss(jnp.eye(3), jnp.eye(3), logit_scale=10.0, negatives=-jnp.eye(3)):.1e}")
    1.8e-04
    """
    n, directions = len(queries), (directions,) if isinstance(directions, str) else directions
    candidates = keys if negatives is None else jnp.concatenate([keys, negatives])
    positive = jnp.arange(n)[:, None] == jnp.arange(len(candidates))
    ids_of_queries = query_ids if query_ids is not None or key_ids is None else key_ids[:n]
    excluded = jnp.zeros_like(positive)
    if ids_of_queries is not None:
        columns = [(query_ids, n) if key_ids is None else (key_ids, len(keys))]
        columns += [(None, len(keys) - n)] * (key_ids is None) + [(negative_ids, len(candidates) - len(keys))]
        equal = [jnp.zeros((n, m), bool) if ids is None else ids_of_queries[:, None] == ids for ids, m in columns]
        excluded = jnp.concatenate(equal, 1) & ~positive
    logits = logit_scale * queries @ candidates.T
    blocks: list[Any] = []
    for direction in directions:
        if direction == "key_to_query":
            blocks.append((logits.T[:n], positive.T[:n], excluded.T[:n]))
            continue
        block: Any = logits, positive, excluded
        if hard_negatives is not None:
            own = logit_scale * jnp.einsum("bd,bhd->bh", queries, hard_negatives)
            none = jnp.zeros(own.shape, bool)
            known = None if hard_negative_ids is None or ids_of_queries is None else ids_of_queries[:, None]
            own_block = own, none, none if known is None else hard_negative_ids == known
            block = tuple(jnp.concatenate(parts, 1) for parts in zip(block, own_block, strict=True))
        blocks.append(block)
    if partition == "joint":
        blocks = [tuple(jnp.concatenate(parts, 1) for parts in zip(*blocks, strict=True))]
    losses = [_cross_entropy(logits, positive, excluded, label_smoothing) for logits, positive, excluded in blocks]
    return _reduce(jnp.stack(losses).mean(0), weights, reduction)


def nt_xent_loss(
    z0: Array,
    z1: Array,
    *,
    temperature: Array | float = 0.1,
    ids: Array | None = None,
    weights: Array | None = None,
    reduction: str = "mean",
) -> Array:
    """Cross-entropy of each row's other view among all other rows (Chen et al., 2020, arXiv:2002.05709, equation 1).

    S = Z Z^T / temperature without its diagonal,    Z = normalize([Z0; Z1]),    L = CE(S, other view)

    >>> print(f"{nt_xent_loss(jnp.eye(3), jnp.eye(3), temperature=0.5):.4f}")
    0.4327
    """
    z = _normalized(jnp.concatenate([z0, z1]))
    itself = jnp.eye(len(z), dtype=bool)
    other = jnp.roll(itself, len(z0), 0)
    excluded = itself if ids is None else (jnp.tile(ids, 2)[:, None] == jnp.tile(ids, 2)) & ~other
    losses = _cross_entropy(z @ z.T / temperature, other, excluded)
    return _reduce(losses.reshape(2, -1).mean(0), weights, reduction)


def siglip_loss(
    image_features: Array,
    text_features: Array,
    logit_scale: Array | float,
    logit_bias: Array | float,
    *,
    ids: Array | None = None,
    equal_ids: str = "positive",
    weights: Array | None = None,
    reduction: str = "mean",
) -> Array:
    """Binary cross-entropy of every pair (Zhai et al., 2023, arXiv:2303.15343, algorithm 1).

    S = logit_scale * X Y^T + logit_bias,    L = -sum_ij log sigmoid(z_ij S_ij) / B,    z_ij = 1 if i = j, else -1

    >>> print(f"{siglip_loss(jnp.eye(3), jnp.eye(3), 10.0, -5.0):.4f}")
    0.0201
    """
    logits = logit_scale * image_features @ text_features.T + logit_bias
    positive, excluded = _pairs(len(logits), ids, equal_ids)
    losses = -jax.nn.log_sigmoid(jnp.where(positive, logits, -logits))
    return _reduce(jnp.where(excluded, 0, losses).sum(1), weights, reduction)


def sup_con_loss(
    features: Array,
    labels: Array,
    *,
    temperature: Array | float = 0.1,
    ignore_index: int | None = None,
    weights: Array | None = None,
    reduction: str = "mean",
) -> Array:
    """Mean cross-entropy of each row's positives among all other rows (Khosla et al., 2020, arXiv:2004.11362,
    equation 2).

    S = Z Z^T / temperature,    L_i = logsumexp_{j != i} S_ij - mean_{p in P(i)} S_ip,    mean over rows with positives

    >>> print(f"{sup_con_loss(jnp.eye(3), jnp.array([0, 0, 1]), temperature=0.5):.4f}")
    0.6931
    """
    checks.classes(labels, None, ignore_index)
    rows = features.shape[:-1]
    z, labels = _normalized(features.reshape(-1, features.shape[-1])), jnp.repeat(labels, features[0, ..., 0].size)
    counted = checks.labeled(labels, ignore_index)
    no_class, excluded = counted & (labels < 0), jnp.eye(len(z), dtype=bool) | ~counted
    positive = (labels[:, None] == labels) & counted[:, None] & ~excluded
    losses = jnp.where(no_class, jnp.nan, _cross_entropy(z @ z.T / temperature, positive, excluded))
    if weights is not None and weights.ndim < len(rows):
        weights = weights[:, None]
    return _reduce(losses.reshape(rows), weights, reduction, (positive.any(1) | no_class).reshape(rows))


def partial_fc_loss(
    embeddings: Array,
    labels: Array,
    centers: Array,
    *,
    margin: Margin = ArcFace(),  # noqa: B008  # it is frozen
    ignore_index: int = -100,
    weights: Array | None = None,
    reduction: str = "mean",
) -> Array:
    """Softmax over all classes with a margin (An et al., 2020, arXiv:2010.05222).

    L_i = -log softmax_j(s c_ij, with s phi(theta_iy) for the own class),    c: cosines of embeddings and centers

    >>> from wholebatch.jax import CosFace
    >>> print(f"{partial_fc_loss(jnp.eye(3, 4), jnp.arange(3), jnp.eye(3, 4), margin=CosFace(4.0, 0.5)):.4f}")
    0.2395
    """
    checks.classes(labels, len(centers), ignore_index)
    x, w = _normalized(embeddings), _normalized(centers)
    counted = checks.labeled(labels, ignore_index)
    labels = jnp.where(counted, labels, 0)
    no_class = (labels < 0) | (labels >= len(w))
    cosines, target = x @ w.T, labels[:, None] == jnp.arange(len(w))
    phi = margin(angles_between(x, w[labels]), norms(moderate(embeddings)[0]) / moderate(embeddings)[1][:, 0])
    logits = margin.s * jnp.where(target, phi[:, None], cosines)
    losses = jnp.where(no_class, jnp.nan, _cross_entropy(logits, target, jnp.zeros_like(target)))
    return _reduce(losses, weights, reduction, counted)


# The parts that they share.


def _cross_entropy(logits: Array, positive: Array, excluded: Array, label_smoothing: float = 0.0) -> Array:
    """Return each row's logsumexp over all entries not excluded, minus its mean positive; 0 without positives."""
    logsumexp = jax.nn.logsumexp(jnp.where(excluded, -jnp.inf, logits), 1)
    uniform = jnp.where(excluded, 0, logits).sum(1) / jnp.maximum((~excluded).sum(1), 1)
    mean = jnp.where(positive, logits, 0).sum(1) / jnp.maximum(positive.sum(1), 1)
    some = positive.any(1)
    return jnp.where(some, jnp.where(some, logsumexp, 0) - (1 - label_smoothing) * mean - label_smoothing * uniform, 0)


def _pairs(n: int, ids: Array | None, equal_ids: str) -> tuple[Array, Array]:
    """Return masks of the positive entries and of the excluded ones."""
    diagonal = jnp.eye(n, dtype=bool)
    equal = diagonal if ids is None else ids[:, None] == ids
    return (equal, jnp.zeros_like(equal)) if equal_ids == "positive" else (diagonal, equal & ~diagonal)


def _normalized(x: Array) -> Array:
    """Divide rows by max(|x_i|, 1e-12), as `torch.nn.functional.normalize` does."""
    x, _ = moderate(x)
    return x / jnp.maximum(norms(x), 1e-12)[..., None]


def _reduce(losses: Array, weights: Array | None, reduction: str, counted: Array | None = None) -> Array:
    """Return the weighted losses, their sum, or their mean over the rows that count."""
    weights = jnp.ones_like(losses) if weights is None else jnp.broadcast_to(weights, losses.shape)
    if counted is not None:
        losses, weights = jnp.where(counted, losses, 0), jnp.where(counted, weights, 0)
    losses = weights * losses
    if reduction == "none":
        return losses
    total = weights.sum()
    return losses.sum() / (1 if reduction == "sum" else jnp.where(total == 0, 1, total))
