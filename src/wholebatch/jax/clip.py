"""CLIP: images and texts, each to be found among all of the other kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh

from . import checks
from .axis import Axis
from .exchange import Memory
from .mesh import AxisNames, in_shard_map, on_mesh, valid_rows
from .options import ExchangeName, Options
from .products import sum_dtype
from .reduction import Reduction, cross_entropy, reduced
from .softmax import Codes, Plan, Tower, softmax_statistics

EqualIdsAre = Literal["positive", "excluded"]


def clip_loss(
    image_features: Array,
    text_features: Array,
    logit_scale: Array | float,
    *,
    ids: Array | None = None,
    equal_ids: EqualIdsAre = "positive",
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    mesh: Mesh | AbstractMesh | None = None,
    axis: AxisNames = "data",
    exchange: ExchangeName = "auto",
    memory: Memory = "flat",
    tile: int = 1024,
) -> Array:
    r"""Symmetric cross-entropy between the images and texts of all devices, with its exact gradient.

    S = logit_scale * X Y^T,    L = (CE(S, diagonal) + CE(S^T, diagonal)) / 2

    Args:
        image_features: X, (B, d), a global array, as it is: the caller normalizes. B need not divide over the devices.
            float64, float32, bfloat16 or float16; products are summed in float32 (float64 for float64).
        text_features: Y, (B, d); row i belongs to row i of X.
        logit_scale: multiplies the similarities (1 / temperature, already exponentiated); a scalar.
        ids: (B,) integers; pairs with equal ids belong together.
        equal_ids: "positive": all of them are positives, and L is the mean over each row's and column's. "excluded":
            only row i is row i's positive, and the others are left out of its sum.
        weights: (B,), of the pairs, >= 0; the mean is sum w_i L_i / sum w_i.
        label_smoothing: weight e of the uniform distribution in both targets, 0 <= e <= 1.
        reduction: "mean", "sum", or "none": w_i L_i, (B,), split over the axis.
        mesh: the devices; its axes may be automatic or explicit. None: the mesh of `jax.set_mesh`, and if there is
            none, the batch is in one piece.
        axis: of the mesh, over which rows are split; several names are taken as one.
        exchange: how the texts travel: "gather" (all of Y on every device, memory O(B d)), "ring" (from device to
            device, memory O(b d)), or "auto": "gather" while it takes at most 1 GiB.
        memory: "flat": S is computed twice and never stored; an int: so many bytes on each device, which hold X Y^T, or
            part of it, between forward and backward, so that it is computed once (in a ring, of a device's own rows).
        tile: rows and columns of the tiles of S, at most; memory beyond O(B d) is a few of them.

    Returns:
        L, the value of `wholebatch.jax.reference.clip_loss` on the whole batch, a scalar that is the same everywhere.

    The gradient is that of this one L, by `jax.grad` under `jit` or without: nothing is to be averaged afterward.

    Work: 4 units of b B d multiply-adds per device, 1 forward and 3 backward; 3 for the part of X Y^T that is kept.
    Collectives: "gather": forward 1 all-gather of Y, 1 all-reduce of B numbers and 1 reduce-scatter, backward 1
    all-gather and 1 reduce-scatter of dY; "ring": W - 1 messages of Y and W of what has been found for it, b
    numbers forward and dY backward; 1 all-reduce of the loss.

    Raises:
        ValueError: while tracing: shapes, dtypes, ids that are no integers, an option or an axis that does not exist.

    Source: Radford et al., 2021, arXiv:2103.00020, figure 3.

    >>> import jax.numpy as jnp, wholebatch.jax as wbj
    >>> print(f"{wbj.clip_loss(jnp.eye(3), jnp.eye(3), 10.0):.1e}")
    9.1e-05
    """
    loss = _Clip(equal_ids, label_smoothing, Options(reduction, exchange, tile, memory))
    rows = loss.check(image_features, text_features, logit_scale, ids, weights)
    per_row = "image_features" if reduction == "none" else None
    return on_mesh(loss, rows, logit_scale, mesh=mesh, axis=axis, per_row=per_row)


def clip_loss_local(
    image_features: Array,
    text_features: Array,
    logit_scale: Array | float,
    *,
    axis_name: AxisNames,
    ids: Array | None = None,
    equal_ids: EqualIdsAre = "positive",
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "flat",
    tile: int = 1024,
) -> Array:
    """:func:`clip_loss` inside of a `jax.shard_map` (with `check_vma=True`, its default), of each device's rows.

    Args:
        image_features: X_r, (b, d), this device's rows; as many on each.
        text_features: Y_r, (b, d).
        logit_scale: the same on all devices.
        axis_name: the axis, or axes, over which rows are split.
        ids: (b,).
        equal_ids: "positive" or "excluded".
        weights: (b,).
        label_smoothing: weight of the uniform distribution in the targets.
        reduction: "mean", "sum", or "none": this device's w_i L_i, (b,).
        exchange: "gather", "ring" or "auto".
        memory: "flat", or bytes on each device for products that are kept from forward to backward.
        tile: rows and columns of a tile of S, at most.

    Returns:
        L of the whole batch, the same on each device.
    """
    loss = _Clip(equal_ids, label_smoothing, Options(reduction, exchange, tile, memory))
    rows = loss.check(image_features, text_features, logit_scale, ids, weights)
    return loss(in_shard_map(axis_name, rows), rows, logit_scale)


@dataclass(frozen=True)
class _Clip:
    """The loss of one device's rows among those of all."""

    equal_ids: EqualIdsAre
    label_smoothing: float
    options: Options

    def check(self, x: Any, y: Any, scale: Any, ids: Any, weights: Any) -> dict[str, Any]:
        checks.choice("equal_ids", self.equal_ids, ("positive", "excluded"))
        checks.fraction("label_smoothing", self.label_smoothing)
        named = {"image_features": x, "text_features": y}
        rows = checks.pairs(*named, **named, ids=ids, weights=weights)
        checks.scalar(logit_scale=scale)
        return rows

    def __call__(self, axis: Axis, rows: dict[str, Any], logit_scale: Any) -> Array:
        x, y, ids = rows["image_features"], rows["text_features"], rows["ids"]
        valid = valid_rows(axis, "image_features", rows)
        codes = Codes.of_pairs(axis.rows(len(x)), ids, valid, together=self.equal_ids == "positive")
        plan = Plan(self.options.sweep(axis, y), smooth=self.label_smoothing > 0)
        scale = checks.as_scalar(logit_scale, sum_dtype(x))
        found = softmax_statistics(plan, Tower(x, None, codes), Tower(y, None, codes), scale)
        losses = [cross_entropy(of, self.label_smoothing) for of in found if of is not None]
        return reduced(axis, jnp.mean(jnp.stack(losses), 0), rows["weights"], valid, self.options.reduction)
