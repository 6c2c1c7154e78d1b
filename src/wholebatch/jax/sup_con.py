"""Supervised contrastive loss: all rows of the same class are positives of each other, with half of the tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh

from . import checks
from .axis import Axis
from .mesh import AxisNames, in_shard_map, on_mesh, valid_rows
from .options import ExchangeName, Memory, Options
from .pairs import Codes, Tower
from .products import inverse_norms, moderate, sum_dtype
from .reduction import Reduction, cross_entropy, reduce_losses
from .softmax import SoftmaxPlan, softmax_statistics


def sup_con_loss(
    features: Array,
    labels: Array,
    *,
    temperature: Array | float = 0.1,
    ignore_index: int | None = None,
    weights: Array | None = None,
    reduction: Reduction = "mean",
    mesh: Mesh | AbstractMesh | None = None,
    axis: AxisNames = "data",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    r"""Mean cross-entropy of each row's positives, the others of its class, among all other rows of all devices.

    S = Z Z^T / temperature,    L_i = logsumexp_{j != i} S_ij - mean_{p in P(i)} S_ip,    Z = normalize(all rows)

    L is the mean over the rows that have a positive; the others are negatives of other rows, but no anchors. Where no
    row has one, L is 0.

    Args:
        features: Z, (B, d), a global array, or (B, v, d) for v views of each example; normalized inside. float64,
            float32, bfloat16 or float16.
        labels: (B,) integers >= 0, the examples' classes. A negative one raises, or makes L NaN under `jit`.
        ignore_index: a label whose rows are left out, as if they were not in the batch.
        temperature: divides the cosines; a positive scalar, which may be learned.
        weights: (B,), of the examples, or (B, v), >= 0; the mean is sum w_i L_i / sum w_i over anchors.
        reduction: "mean", "sum", or "none": w_i L_i, (B,) or (B, v), split over the axis; 0 where there is no positive.
        mesh: the devices, as in :func:`wholebatch.jax.clip_loss`.
        axis: the axis of the mesh over which rows are split; several names are used as one axis.
        exchange: "gather", "ring" or "auto", as there.
        memory: "flat", "auto" or bytes, as there, of half of Z Z^T.
        tile: rows and columns of a tile of S, at most; None: as many as `memory` allows.

    Returns:
        L, a scalar, the same on every device: the value of `wholebatch.jax.reference.sup_con_loss` on the whole batch.

    Work, memory and collectives: as :func:`wholebatch.jax.nt_xent_loss`.

    Raises:
        ValueError: while tracing: as :func:`wholebatch.jax.nt_xent_loss`; also labels that are no integers, or not one
            for each example.
        NotImplementedError: if the gradient is differentiated again.

    Source: Khosla et al., 2020, arXiv:2004.11362, equation 2 (L_out); its factor temperature / base_temperature is
    left to the caller.

    >>> import jax.numpy as jnp, wholebatch.jax as wbj
    >>> print(f"{wbj.sup_con_loss(jnp.eye(3), jnp.array([0, 0, 1]), temperature=0.5):.4f}")
    0.6931
    """
    loss = _SupCon(ignore_index, Options(reduction, exchange, tile, memory))
    rows = loss.check(temperature, features=features, labels=labels, weights=weights)
    return on_mesh(loss, rows, temperature, mesh=mesh, axis=axis, per_row=reduction == "none")


def sup_con_loss_local(
    features: Array,
    labels: Array,
    *,
    axis_name: AxisNames,
    temperature: Array | float = 0.1,
    ignore_index: int | None = None,
    weights: Array | None = None,
    reduction: Reduction = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    """:func:`sup_con_loss` of each device's rows, inside of a `jax.shard_map` (with `check_vma=True`, its default).

    Takes what :func:`sup_con_loss` takes, of this device: features (b, d) or (b, v, d), labels (b,), L_i (b,) or (b,
    v); as many rows on each device. In place of `mesh` and `axis` it takes `axis_name`, the axis over which rows are
    split; several names are used as one axis.

    Returns:
        L of the whole batch, the same on every device.

    Raises:
        ValueError: as :func:`sup_con_loss`; also rows that JAX does not know to vary over the axis.
    """
    loss = _SupCon(ignore_index, Options(reduction, exchange, tile, memory))
    rows = loss.check(temperature, features=features, labels=labels, weights=weights)
    return loss(in_shard_map(axis_name, rows), rows, temperature)


@dataclass(frozen=True)
class _SupCon:
    """The loss of one device's rows among the rows of all devices."""

    ignore_index: int | None
    options: Options

    def check(self, temperature: Any, **arguments: Any) -> dict[str, Any]:
        checks.scalar(temperature=temperature, positive=True)
        rows = checks.arrays(**arguments)
        z, weights = rows["features"], rows["weights"]
        checks.required(features=z, labels=rows["labels"])
        if z.ndim not in (2, 3):
            raise ValueError(
                f"features must have shape (rows, embedding size) or (rows, views, embedding size), got {jnp.shape(z)}"
            )
        checks.features(features=z.reshape(-1, z.shape[-1]))
        checks.same_rows(**rows)
        checks.vector(labels=rows["labels"])
        checks.integers(labels=rows["labels"])
        if self.ignore_index is not None:
            checks.integer("ignore_index", self.ignore_index)
        checks.classes(rows["labels"], None, self.ignore_index)
        if weights is not None and weights.shape not in (z.shape[:1], z.shape[:-1]):
            raise ValueError(f"weights must have shape {z.shape[:1]} or {z.shape[:-1]}, got {weights.shape}")
        return rows

    def __call__(self, axis: Axis, rows: dict[str, Any], temperature: Any) -> Array:
        features, weights = rows["features"], rows["weights"]
        b, shape = len(features), features.shape[:-1]  # (rows,), or (rows, views)
        z, views = moderate(features.reshape(-1, features.shape[-1]))[0], features.size // (b * features.shape[-1])

        def for_all_views(x: Array | None) -> Array | None:
            """Repeat each example's value for all of its views."""
            return None if x is None else jnp.repeat(x, views)

        valid, labels = for_all_views(valid_rows(axis, "features", rows)), jnp.repeat(rows["labels"], views)
        if self.ignore_index is not None:
            valid = checks.labeled(labels, self.ignore_index) & (True if valid is None else valid)
        wrong = (labels < 0) & (True if valid is None else valid)
        codes = Codes(valid, itself=axis.rows(len(z)), pair=labels)
        plan = SoftmaxPlan(self.options.sweep(axis, z, z, symmetric=True), count=True)
        scale = 1 / checks.as_scalar(temperature, sum_dtype(z))
        statistics, _ = softmax_statistics(plan, Tower(z, inverse_norms(z), codes), None, scale)
        assert statistics is not None
        assert statistics.num_positives is not None
        anchors = (statistics.num_positives > 0) | wrong
        if weights is not None:
            weights = weights.reshape(-1) if weights.ndim == 2 else for_all_views(weights)
        each = jnp.where(wrong, jnp.nan, cross_entropy(statistics))
        losses = reduce_losses(axis, each, weights, anchors, self.options.reduction)
        return losses.reshape(shape) if self.options.reduction == "none" else losses
