"""SigLIP: a binary classification of every pair of an image and a text of the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh

from .._base.settings import check_choice
from . import checks
from .axis import Axis
from .clip import EQUAL_IDS, EqualIdsAre
from .mesh import AxisNames, in_shard_map, on_mesh, valid_rows
from .options import ExchangeName, Memory, Options
from .pairs import Codes, Tower
from .products import sum_dtype
from .reduction import Reduction, weighted_mean
from .sigmoid import row_losses, weighted_sum


def siglip_loss(
    image_features: Array,
    text_features: Array,
    logit_scale: Array | float,
    logit_bias: Array | float,
    *,
    ids: Array | None = None,
    equal_ids: EqualIdsAre = "positive",
    weights: Array | None = None,
    reduction: Reduction = "mean",
    mesh: Mesh | AbstractMesh | None = None,
    axis: AxisNames = "data",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    r"""Binary cross-entropy of all pairs of images and texts of all devices, with its exact gradient.

    S = logit_scale * X Y^T + logit_bias,    L = sum_ij softplus(-z_ij S_ij) / B

    The sum runs over all B^2 pairs, and is divided by the B images.

    Args:
        image_features: X, (B, d), a global array, as it is: the caller normalizes. float64, float32, bfloat16 or
            float16.
        text_features: Y, (B, d); row i belongs to row i of X.
        logit_scale: multiplies the similarities (1 / temperature, already exponentiated); a scalar.
        logit_bias: added to all logits, about -log B at the start of training; a scalar.
        ids: (B,) integers; pairs with equal ids belong together.
        equal_ids: "positive": z_ij = 1 for them. "excluded": they are left out of the sum.
        weights: (B,), of the images, >= 0: of all pairs that they are in; L is then divided by their sum.
        reduction: "mean" over images, "sum", or "none": w_i L_i of each image, (B,), split over the axis, for which
            the backward pass sweeps again.
        mesh: the devices, as in :func:`wholebatch.jax.clip_loss`.
        axis: the axis of the mesh over which rows are split; several names are used as one axis.
        exchange: "gather", "ring" or "auto", as there.
        memory: of a tile of S, as there; nothing of S is kept, because nothing of it is needed again.
        tile: rows and columns of a tile of S, at most; None: as many as `memory` allows.

    Returns:
        L, a scalar, the same on every device: the value of `wholebatch.jax.reference.siglip_loss` on the whole batch.

    Work: 3 units of b B d multiply-adds per device, all in the forward pass; 1 where no gradient is computed. Memory
    and collectives: as in :func:`wholebatch.jax.clip_loss`, but Y travels only once.

    Raises:
        ValueError: while tracing: as :func:`wholebatch.jax.clip_loss`.
        NotImplementedError: if the gradient is differentiated again.

    Source: Zhai et al., 2023, arXiv:2303.15343, equation 1 and algorithm 1.

    >>> import jax.numpy as jnp, wholebatch.jax as wbj
    >>> print(f"{wbj.siglip_loss(jnp.eye(3), jnp.eye(3), 10.0, -5.0):.4f}")
    0.0201
    """
    loss = _SigLIP(equal_ids, Options(reduction, exchange, tile, memory))
    rows = loss.check(
        logit_scale, logit_bias, image_features=image_features, text_features=text_features, ids=ids, weights=weights
    )
    return on_mesh(loss, rows, (logit_scale, logit_bias), mesh=mesh, axis=axis, per_row=reduction == "none")


def siglip_loss_local(
    image_features: Array,
    text_features: Array,
    logit_scale: Array | float,
    logit_bias: Array | float,
    *,
    axis_name: AxisNames,
    ids: Array | None = None,
    equal_ids: EqualIdsAre = "positive",
    weights: Array | None = None,
    reduction: Reduction = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    """:func:`siglip_loss` of each device's rows, inside of a `jax.shard_map` (with `check_vma=True`, its default).

    Takes what :func:`siglip_loss` takes, of this device: features (b, d), ids and weights (b,), L_i (b,); as many rows
    on each device. In place of `mesh` and `axis` it takes `axis_name`, the axis over which rows are split; several
    names are used as one axis.

    Returns:
        L of the whole batch, the same on every device.

    Raises:
        ValueError: as :func:`siglip_loss`; also rows that JAX does not know to vary over the axis.
    """
    loss = _SigLIP(equal_ids, Options(reduction, exchange, tile, memory))
    rows = loss.check(
        logit_scale, logit_bias, image_features=image_features, text_features=text_features, ids=ids, weights=weights
    )
    return loss(in_shard_map(axis_name, rows), rows, (logit_scale, logit_bias))


@dataclass(frozen=True)
class _SigLIP:
    """The loss of one device's images with the texts of all devices."""

    equal_ids: EqualIdsAre
    options: Options

    def check(self, logit_scale: Any, logit_bias: Any, **arguments: Any) -> dict[str, Any]:
        check_choice("equal_ids", self.equal_ids, EQUAL_IDS)
        checks.scalar(logit_scale=logit_scale, logit_bias=logit_bias)
        return checks.pairs("image_features", "text_features", **arguments)

    def __call__(self, axis: Axis, rows: dict[str, Any], scalars: Any) -> Array:
        x, y, ids, weights = (rows[name] for name in ("image_features", "text_features", "ids", "weights"))
        valid, dtype = valid_rows(axis, "image_features", rows), sum_dtype(x)
        codes = Codes.of_pairs(axis.rows(len(x)), ids, valid, positive=self.equal_ids == "positive")
        weights = jnp.ones(len(x), dtype) if weights is None else weights.astype(dtype)
        if valid is not None:
            weights = jnp.where(valid, weights, 0)
        scale, bias = (checks.as_scalar(number, dtype) for number in scalars)
        pairs = (self.options.sweep(axis, x, y), Tower(x, None, codes), Tower(y, None, codes), scale, bias)
        if self.options.reduction == "none":
            return weights * row_losses(*pairs)
        total = axis.sum(weighted_sum(*pairs, weights))
        return total if self.options.reduction == "sum" else weighted_mean(axis, total, weights)
