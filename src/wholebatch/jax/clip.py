"""CLIP: symmetric softmax cross-entropy between images and texts of the global batch, on any number of devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh

from .._base.settings import check_choice
from . import checks
from .axis import Axis
from .mesh import AxisNames, in_shard_map, on_mesh, valid_rows
from .options import ExchangeName, Memory, Options
from .pairs import Codes, Tower
from .products import sum_dtype
from .reduction import Reduction, cross_entropy, reduce_losses
from .softmax import SoftmaxPlan, softmax_statistics

EqualIdsAre = Literal["positive", "excluded"]
EQUAL_IDS = ("positive", "excluded")


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
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    r"""Symmetric cross-entropy between the images and texts of all devices, with its exact gradient.

    S = logit_scale * X Y^T,    L = (CE(S, diagonal) + CE(S^T, diagonal)) / 2

    Args:
        image_features: X, (B, d), a global array, as it is: the caller normalizes. B need not divide over the devices.
            float64, float32, bfloat16 or float16; products are summed in float32 (float64 for float64).
        text_features: Y, (B, d); row i belongs to row i of X.
        logit_scale: multiplies the similarities (1 / temperature, already exponentiated); a scalar.
        ids: (B,) integers; pairs with equal ids (the same caption, the same product) belong together.
        equal_ids: "positive": all of them are positives, and L is the mean over each row's and column's (UniCL).
            "excluded": only row i is row i's positive, and the others are left out of its sum.
        weights: (B,), of the pairs, >= 0; the mean is sum w_i L_i / sum w_i.
        label_smoothing: weight e of the uniform distribution in both targets, 0 <= e <= 1.
        reduction: "mean", "sum", or "none": w_i L_i, (B,), split over the axis.
        mesh: the devices; its axes may be automatic or explicit. None takes the mesh of `jax.set_mesh`; without one,
            the batch is in one piece.
        axis: the axis of the mesh over which rows are split; several names are used as one axis.
        exchange: how the texts travel: "gather" (all of Y on every device, memory O(B d)), "ring" (from device to
            device, memory O(b d)), or "auto": "gather" while it takes at most 1 GiB.
        memory: bytes, on each device, of X Y^T, which is kept between forward and backward so that it is computed once:
            all of it, or part of it (in a ring, of the device's local block). "flat": nothing is kept, S is computed
            twice, and tiles have 1024 rows and columns. "auto": 1 GiB; while X Y^T fits, this is the dense formula.
        tile: rows and columns of a tile of S, at most; None: all of a device's block if X Y^T fits into `memory`, else
            a quarter of it, but at least 1024.

    Returns:
        L, a scalar, the same on every device: the value of `wholebatch.jax.reference.clip_loss` on the whole batch.

    The gradient is that of this one L, by `jax.grad`, under `jit` or not; no average over devices is needed.

    Work: 4 units of b B d multiply-adds per device, 1 forward and 3 backward; 3 for the part of X Y^T that is kept.
    Memory beyond inputs and gradients: the part of X Y^T that is kept, a few tiles, and on several devices O(B d)
    ("gather") or O(b d) ("ring").

    Collectives: "gather": forward 1 all-gather of Y, 1 all-reduce of B numbers and 1 reduce-scatter, backward 1
    all-gather and 1 reduce-scatter of dY; "ring": W - 1 messages of Y and W of its columns' sums, b numbers forward and
    dY backward; and 1 all-reduce of the loss.

    Raises:
        ValueError: while tracing: shapes, dtypes, ids that are no integers, an option or an axis that does not exist.
        NotImplementedError: if the gradient is differentiated again.

    Source: Radford et al., 2021, arXiv:2103.00020, figure 3.

    >>> import jax.numpy as jnp, wholebatch.jax as wbj
    >>> print(f"{wbj.clip_loss(jnp.eye(3), jnp.eye(3), 10.0):.1e}")
    9.1e-05
    """
    loss = _CLIP(equal_ids, label_smoothing, Options(reduction, exchange, tile, memory))
    rows = loss.check(image_features, text_features, logit_scale, ids, weights)
    return on_mesh(loss, rows, logit_scale, mesh=mesh, axis=axis, per_row=reduction == "none")


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
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    """:func:`clip_loss` of each device's rows, inside of a `jax.shard_map` (with `check_vma=True`, its default).

    Takes what :func:`clip_loss` takes, of this device: features (b, d), ids and weights (b,), L_i (b,); as many rows
    on each device. In place of `mesh` and `axis` it takes `axis_name`, the axis over which rows are split; several
    names are used as one axis.

    Returns:
        L of the whole batch, the same on every device.

    Raises:
        ValueError: as :func:`clip_loss`; also rows that JAX does not know to vary over the axis.
    """
    loss = _CLIP(equal_ids, label_smoothing, Options(reduction, exchange, tile, memory))
    rows = loss.check(image_features, text_features, logit_scale, ids, weights)
    return loss(in_shard_map(axis_name, rows), rows, logit_scale)


@dataclass(frozen=True)
class _CLIP:
    """The loss of one device's rows among the rows of all devices."""

    equal_ids: EqualIdsAre
    label_smoothing: float
    options: Options

    def check(self, x: Any, y: Any, scale: Any, ids: Any, weights: Any) -> dict[str, Any]:
        check_choice("equal_ids", self.equal_ids, EQUAL_IDS)
        checks.fraction("label_smoothing", self.label_smoothing)
        named = {"image_features": x, "text_features": y}
        rows = checks.pairs(*named, **named, ids=ids, weights=weights)
        checks.scalar(logit_scale=scale)
        return rows

    def __call__(self, axis: Axis, rows: dict[str, Any], logit_scale: Any) -> Array:
        x, y, ids = rows["image_features"], rows["text_features"], rows["ids"]
        valid = valid_rows(axis, "image_features", rows)
        codes = Codes.of_pairs(axis.rows(len(x)), ids, valid, positive=self.equal_ids == "positive")
        plan = SoftmaxPlan(self.options.sweep(axis, x, y), count=codes.pair is ids, smooth=self.label_smoothing > 0)
        scale = checks.as_scalar(logit_scale, sum_dtype(x))
        sides = softmax_statistics(plan, Tower(x, None, codes), Tower(y, None, codes), scale)
        losses = [cross_entropy(side, self.label_smoothing) for side in sides if side is not None]
        return reduce_losses(axis, jnp.mean(jnp.stack(losses), 0), rows["weights"], valid, self.options.reduction)
