"""NT-Xent, the loss of SimCLR: each row of two views against all other rows of both, with half of the tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
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


def nt_xent_loss(
    z0: Array,
    z1: Array,
    *,
    temperature: Array | float = 0.1,
    ids: Array | None = None,
    weights: Array | None = None,
    reduction: Reduction = "mean",
    mesh: Mesh | AbstractMesh | None = None,
    axis: AxisNames = "data",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    r"""Cross-entropy of each row's other view among all rows of both views but itself, with its exact gradient.

    S = Z Z^T / temperature,    L = CE(S without its diagonal, other view),    Z = normalize([Z0; Z1])

    Args:
        z0: (B, d), a global array, of the first view; normalized inside. float64, float32, bfloat16 or float16.
        z1: (B, d), the second view; row i is another view of row i of z0.
        temperature: divides the cosines; a positive scalar, which may be learned.
        ids: (B,) integers; examples with equal ids are no negatives of each other.
        weights: (B,), of the examples, >= 0; the mean is sum w_i L_i / sum w_i.
        reduction: "mean", "sum", or "none": for each example w_i times the mean over both views, (B,), split over the
            axis.
        mesh: the devices, as in :func:`wholebatch.jax.clip_loss`.
        axis: the axis of the mesh over which rows are split; several names are used as one axis.
        exchange: "gather", "ring" or "auto", as there.
        memory: "flat", "auto" or bytes, as there, of half of Z Z^T.
        tile: rows and columns of a tile of S, at most; None: as many as `memory` allows.

    Returns:
        L, a scalar, the same on every device: the value of `wholebatch.jax.reference.nt_xent_loss` on the whole batch.

    Work: 2 units of 2b 2B d multiply-adds per device, half of a full sweep's 4, because S is symmetric. Memory and
    collectives: as in :func:`wholebatch.jax.clip_loss`; a ring stops after half a round.

    Raises:
        ValueError: while tracing: as :func:`wholebatch.jax.clip_loss`; also a temperature that is known and not
            positive.
        NotImplementedError: if the gradient is differentiated again.

    Source: Chen et al., 2020, arXiv:2002.05709, equation 1.

    >>> import jax.numpy as jnp, wholebatch.jax as wbj
    >>> print(f"{wbj.nt_xent_loss(jnp.eye(3), jnp.eye(3), temperature=0.5):.4f}")
    0.4327
    """
    loss = _NTXent(Options(reduction, exchange, tile, memory))
    rows = loss.check(temperature, z0=z0, z1=z1, ids=ids, weights=weights)
    return on_mesh(loss, rows, temperature, mesh=mesh, axis=axis, per_row=reduction == "none")


def nt_xent_loss_local(
    z0: Array,
    z1: Array,
    *,
    axis_name: AxisNames,
    temperature: Array | float = 0.1,
    ids: Array | None = None,
    weights: Array | None = None,
    reduction: Reduction = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    """:func:`nt_xent_loss` of each device's rows, inside of a `jax.shard_map` (with `check_vma=True`, its default).

    Takes what :func:`nt_xent_loss` takes, of this device: views (b, d), ids and weights (b,), L_i (b,); as many rows
    on each device. In place of `mesh` and `axis` it takes `axis_name`, the axis over which rows are split; several
    names are used as one axis.

    Returns:
        L of the whole batch, the same on every device.

    Raises:
        ValueError: as :func:`nt_xent_loss`; also rows that JAX does not know to vary over the axis.
    """
    loss = _NTXent(Options(reduction, exchange, tile, memory))
    rows = loss.check(temperature, z0=z0, z1=z1, ids=ids, weights=weights)
    return loss(in_shard_map(axis_name, rows), rows, temperature)


@dataclass(frozen=True)
class _NTXent:
    """The loss of one device's examples among the examples of all devices."""

    options: Options

    def check(self, temperature: Any, **arguments: Any) -> dict[str, Any]:
        checks.scalar(temperature=temperature, positive=True)
        return checks.pairs("z0", "z1", **arguments)

    def __call__(self, axis: Axis, rows: dict[str, Any], temperature: Any) -> Array:
        b, valid = len(rows["z0"]), valid_rows(axis, "z0", rows)
        example, z = axis.rows(b), moderate(jnp.concatenate([rows["z0"], rows["z1"]]))[0]
        example_codes = Codes(valid, pair=example, same=rows["ids"])
        codes = jax.tree.map(lambda code: jnp.concatenate([code, code]), example_codes)
        codes = codes._replace(itself=jnp.concatenate([example, example + b * axis.size]))
        plan = SoftmaxPlan(self.options.sweep(axis, z, z, symmetric=True))
        scale = 1 / checks.as_scalar(temperature, sum_dtype(z))
        statistics, _ = softmax_statistics(plan, Tower(z, inverse_norms(z), codes), None, scale)
        assert statistics is not None
        losses = cross_entropy(statistics).reshape(2, b).mean(0)
        return reduce_losses(axis, losses, rows["weights"], valid, self.options.reduction)
