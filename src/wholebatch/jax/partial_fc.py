"""PartialFC: softmax over classes that are split over the devices, with a margin and with samples of classes.

    L_i = log(e^{s phi(theta_i)} + sum_{j != y_i} e^{s c_ij}) - s phi(theta_i)
        = softplus(lse_i - s phi(theta_i)),    lse_i over the negatives

This is the column half of CLIP: centers stay, embeddings travel, and each column's sum excludes its own class. The
angle to the own class's center is computed separately, after that center has been fetched.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh

from .._base.settings import shown
from . import checks
from .axis import Axis, vary_alike
from .margins import ArcFace, Margin
from .mesh import AxisNames, in_shard_map, on_mesh, valid_rows
from .options import ExchangeName, Memory, Options
from .pairs import Codes, Tower
from .products import angles_between, inverse_norms, moderate, norms, sum_dtype
from .reduction import Reduction, reduce_losses
from .softmax import SoftmaxPlan, softmax_statistics

_NO_CLASS = -1


def partial_fc_loss(
    embeddings: Array,
    labels: Array,
    centers: Array,
    *,
    margin: Margin = ArcFace(),  # noqa: B008  # it is frozen
    sample_rate: float = 1.0,
    key: Array | None = None,
    ignore_index: int = -100,
    weights: Array | None = None,
    reduction: Reduction = "mean",
    mesh: Mesh | AbstractMesh | None = None,
    axis: AxisNames = "data",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    r"""Cross-entropy over the classes of all devices, with a margin for the example's own, and its exact gradient.

    L_i = log(exp(s phi(c_iy)) + sum_{j != y} exp(s c_ij)) - s phi(c_iy),    c = cosines of embeddings and centers

    Args:
        embeddings: (B, d), a global array; normalized inside. float64, float32, bfloat16 or float16.
        labels: (B,) integers, their classes among all C; ignore_index: the row does not count. Any other number that
            is no class raises, or makes L NaN under `jit`, where the values of arrays are not known.
        centers: (C, d), of all classes, split over the same axis; normalized inside.
        margin: phi and s, such as :class:`wholebatch.jax.ArcFace`.
        sample_rate: the probability with which each class is sampled as a negative, independently; the classes of the
            batch always take part. The sample depends on `key` and the classes alone, not on the number of devices.
        key: a new key of `jax.random` for each step; only for samples.
        ignore_index: the label of rows that do not count.
        weights: (B,), >= 0; the mean is sum w_i L_i / sum w_i over the rows that count.
        reduction: "mean" over the rows that count, "sum", or "none": w_i L_i, (B,), split over the axis.
        mesh: the devices, as in :func:`wholebatch.jax.clip_loss`.
        axis: the axis of the mesh over which embeddings and centers are split; several names are used as one axis.
        exchange: "gather", "ring" or "auto", as there, for the embeddings.
        memory: "flat", "auto" or bytes, as there, of this device's classes times the batch.
        tile: rows and columns of a tile of S, at most; None: as many as `memory` allows.

    Returns:
        L, a scalar, the same on every device: the value of `wholebatch.jax.reference.partial_fc_loss` on all embeddings
        and all centers.

    Work: 4 units of B C/W d multiply-adds per device; with samples, C times sample_rate and at most B more classes.
    Memory and collectives: as in :func:`wholebatch.jax.clip_loss`, with embeddings instead of texts; and to fetch the
    centers of the batch's classes an all-gather of labels and a reduce-scatter of (B, d), or a ring of messages of
    (b, d).

    Raises:
        ValueError: while tracing: as :func:`wholebatch.jax.clip_loss`; also labels that are no integers or, where they
            are known, no classes, and a sample without a key.
        NotImplementedError: if the gradient is differentiated again.

    Source: An et al., 2020, arXiv:2010.05222; the margins' papers.

    >>> import jax.numpy as jnp, wholebatch.jax as wbj
    >>> x = jnp.eye(3, 4)
    >>> print(f"{wbj.partial_fc_loss(x, jnp.arange(3), x, margin=wbj.CosFace(4.0, 0.5)):.4f}")
    0.2395
    """
    loss = _PartialFC(margin, sample_rate, ignore_index, Options(reduction, exchange, tile, memory))
    rows = loss.check(key, embeddings=embeddings, labels=labels, centers=centers, weights=weights)
    checks.classes(labels, len(rows["centers"]), ignore_index)
    return on_mesh(loss, rows, key, mesh=mesh, axis=axis, per_row=reduction == "none")


def partial_fc_loss_local(
    embeddings: Array,
    labels: Array,
    centers: Array,
    *,
    axis_name: AxisNames,
    margin: Margin = ArcFace(),  # noqa: B008  # it is frozen
    sample_rate: float = 1.0,
    key: Array | None = None,
    ignore_index: int = -100,
    weights: Array | None = None,
    reduction: Reduction = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    """:func:`partial_fc_loss` of each device's rows, inside of a `jax.shard_map` (with `check_vma=True`, its default).

    Takes what :func:`partial_fc_loss` takes, of this device: embeddings (b, d), labels (b,), centers (C_r, d) of this
    device's classes, which are consecutive, L_i (b,); as many rows on each device. In place of `mesh` and `axis` it
    takes `axis_name`, the axis over which rows are split; several names are used as one axis.

    Returns:
        L of the whole batch, the same on every device.

    Raises:
        ValueError: as :func:`partial_fc_loss`; also rows that JAX does not know to vary over the axis.
    """
    loss = _PartialFC(margin, sample_rate, ignore_index, Options(reduction, exchange, tile, memory))
    rows = loss.check(key, embeddings=embeddings, labels=labels, centers=centers, weights=weights)
    return loss(in_shard_map(axis_name, rows), rows, key)


@dataclass(frozen=True)
class _PartialFC:
    """The loss of one device's embeddings against the classes of all devices."""

    margin: Margin
    sample_rate: float
    ignore_index: int
    options: Options

    def check(self, key: Any, **arguments: Any) -> dict[str, Any]:
        checks.fraction("sample_rate", self.sample_rate)
        _check_margin(self.margin)
        if self.sample_rate < 1 and key is None:
            raise ValueError(f"sample_rate={self.sample_rate} needs key=, a new one of jax.random for each step")
        checks.random_key(key)
        rows = checks.arrays(**arguments)
        checks.required(labels=rows["labels"])
        checks.integer("ignore_index", self.ignore_index)
        checks.features(embeddings=rows["embeddings"], centers=rows["centers"])
        checks.same_rows(embeddings=rows["embeddings"], labels=rows["labels"], weights=rows["weights"])
        checks.vector(labels=rows["labels"], weights=rows["weights"])
        checks.integers(labels=rows["labels"])
        labels = rows["labels"]
        return rows | {"labels": labels.astype(jnp.promote_types(labels.dtype, jnp.int32))}  # as wide as indices

    def __call__(self, axis: Axis, rows: dict[str, Any], key: Array | None) -> Array:
        (x, power), labels, (centers, _) = moderate(rows["embeddings"]), rows["labels"], moderate(rows["centers"])
        num_classes = rows.get("totals", {}).get("centers", len(centers) * axis.size)
        valid = valid_rows(axis, "embeddings", rows)
        counted = checks.labeled(labels, self.ignore_index)
        counted = counted if valid is None else counted & valid
        sweep = self.options.sweep(axis, centers, x)
        labels = jnp.where(counted, labels, _NO_CLASS)
        fetched, present = _fetch_centers(axis, centers, labels, ring=sweep.exchange == "ring" and axis.size > 1)
        x_factors, fetched_factors = inverse_norms(x), inverse_norms(fetched)
        angles = angles_between(x * x_factors[:, None], fetched * fetched_factors[:, None])
        targets = self.margin.s * self.margin(angles, norms(x) / power[:, 0])

        classes = Tower(centers, None, Codes(valid_rows(axis, "centers", rows), itself=axis.rows(len(centers))))
        if self.sample_rate < 1:
            classes = self._sample(classes, present, key, len(labels) * axis.size)
        classes = classes._replace(inverse_norms=inverse_norms(classes.features))
        plan = SoftmaxPlan(sweep, rows=False, positives=False)
        examples = Tower(x, x_factors, Codes(valid, itself=labels))
        _, statistics = softmax_statistics(plan, classes, examples, jnp.asarray(self.margin.s, sum_dtype(x)))
        assert statistics is not None
        losses = jax.nn.softplus(statistics.lse - targets)
        losses = jnp.where((labels >= 0) & (labels < num_classes), losses, jnp.nan)
        return reduce_losses(axis, losses, rows["weights"], counted, self.options.reduction)

    def _sample(self, classes: Tower, present: Array, key: Any, examples: int) -> Tower:
        """Sample this device's classes; those present in the batch of so many examples are always taken.

        The number of rows is fixed.
        """
        count, ids = len(classes.features), classes.codes.itself
        assert ids is not None
        chosen = present | sampled(key, ids, self.sample_rate)
        if classes.codes.valid is not None:
            chosen &= classes.codes.valid
        deviations = 8 * sqrt(count * self.sample_rate * (1 - self.sample_rate))  # 8 standard deviations
        room = min(count, ceil(count * self.sample_rate + deviations) + min(examples, count))
        _, places = lax.top_k(2 * present.astype(jnp.int32) + chosen, room)
        return Tower(classes.features[places], None, Codes(chosen[places], itself=ids[places]))


def _check_margin(margin: Any) -> None:
    """Raise ValueError unless margin is a hashable margin of wholebatch.jax, or one like it."""
    is_margin = not isinstance(margin, type) and callable(margin) and hasattr(margin, "s")
    if not is_margin or ".heads." in str(type(margin)):
        raise ValueError(f"margin must be such as wholebatch.jax.ArcFace(s=64.0, m=0.5), got {shown(margin)}")
    if not isinstance(margin, Hashable):
        raise ValueError(
            f"margin must be hashable, because tracing caches it: use a @dataclass(frozen=True); got {shown(margin)}"
        )


def sampled(key: Array, ids: Array, rate: float) -> Array:
    """Whether each class is sampled, with probability `rate`: a function of the key and the class alone."""

    def uniform(class_id: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, class_id), dtype=jnp.float32)

    return jax.vmap(uniform)(ids) < rate


def _fetch_centers(axis: Axis, centers: Array, labels: Array, *, ring: bool) -> tuple[Array, Array]:
    """Fetch the center of each row's class, and find which of this device's classes occur in the batch.

    Labels travel to all devices once.

    Returns:
        (b, d), zeros for a row without a class; and for each local center whether some device has an example of it.
    """
    count, first = len(centers), axis.index * len(centers)

    def visit(present: Array, labels: Array) -> tuple[Array, Array]:
        places = _local_places(labels, first, count)
        return present.at[places].set(True, mode="drop"), centers.at[places].get(mode="fill", fill_value=0)

    (none_present,) = vary_alike(jnp.zeros(count, bool), axis=axis)
    if not ring:
        present, fetched = visit(none_present, axis.gather(labels))
        return axis.reduce_scatter(fetched), present

    def step(so_far: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
        present, *traveling = so_far
        labels, fetched = axis.receive_from(traveling, 1)
        present, added = visit(present, labels)
        return (present, labels, fetched + added), None

    present, fetched = visit(none_present, labels)
    start = vary_alike(present, labels, fetched, axis=axis)
    (present, _, fetched), _ = lax.scan(step, start, None, length=axis.size - 1)
    return axis.receive_from(fetched, 1), present


def _local_places(labels: Array, first: Array, count: int) -> Array:
    """Return the local row of each class's center, or `count`, beyond all rows, if another device has it."""
    places = labels - first
    return jnp.where((places >= 0) & (places < count), places, count)
