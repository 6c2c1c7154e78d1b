"""PartialFC: softmax over classes that are split over the devices, with a margin and with samples of classes.

    L_i = log(e^{s phi(theta_i)} + sum_{j != y_i} e^{s c_ij}) - s phi(theta_i)
        = softplus(lse_i - s phi(theta_i)),    lse_i over the negatives

That is the column half of CLIP: centers stay, embeddings travel, and the own class is left out of their columns' sums.
Its angle is taken apart from that, between an embedding and its own class's center, which is fetched.
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

from .._settings import shown
from . import checks
from .axis import Axis, vary_alike
from .exchange import Memory
from .margins import ArcFace, Margin
from .mesh import AxisNames, in_shard_map, on_mesh, valid_rows
from .options import ExchangeName, Options
from .products import inverse_norms, lacking, moderate, norms, sum_dtype
from .reduction import Reduction, reduced
from .softmax import Codes, Plan, Tower, softmax_statistics

_NO_CLASS = -1
_SAME = 16  # times eps: unit vectors that are nearer to each other are taken for the same


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
    memory: Memory = "flat",
    tile: int = 1024,
) -> Array:
    r"""Cross-entropy over the classes of all devices, with a margin for the example's own, and its exact gradient.

    L_i = log(exp(s phi(c_iy)) + sum_{j != y} exp(s c_ij)) - s phi(c_iy),    c = cosines of embeddings and centers

    Args:
        embeddings: (B, d), a global array; normalized inside. float64, float32, bfloat16 or float16.
        labels: (B,) integers, their classes among all C; ignore_index: the row does not count. Any other number that
            is no class raises, or makes L NaN under `jit`, where what arrays hold is not known.
        centers: (C, d), of all classes, split over the same axis; normalized inside.
        margin: phi and s, such as :class:`wholebatch.jax.ArcFace`.
        sample_rate: the share of classes that are drawn as negatives, each by itself; the classes of the batch always
            take part. The sample depends on `key` and the classes alone, not on the number of devices.
        key: of `jax.random`, a new one for each step; only for samples.
        ignore_index: a label that says that there is none.
        weights: (B,), >= 0; the mean is sum w_i L_i / sum w_i over the rows that count.
        reduction: "mean" over the rows that count, "sum", or "none": w_i L_i, (B,).
        mesh: the devices; None: the mesh of `jax.set_mesh`, and without one the batch is in one piece.
        axis: of the mesh, over which both embeddings and centers are split; several names are taken as one.
        exchange: how the embeddings travel: "gather", "ring" or "auto".
        memory: "flat", or bytes on each device for products that are kept from forward to backward.
        tile: rows and columns of a tile of S, at most.

    Returns:
        L, the value of `wholebatch.jax.reference.partial_fc_loss` on all embeddings and all centers.

    Work: 4 units of B C/W d multiply-adds per device; of a sample, C times sample_rate and at most B classes more.
    Collectives: as in :func:`wholebatch.jax.clip_loss`, with embeddings in the place of texts, and for the own classes'
    centers an all-gather of labels and a reduce-scatter of (B, d), or a ring of messages of (b, d).

    Raises:
        ValueError: while tracing: shapes, dtypes, an option or an axis that does not exist;
            labels that are no integers or, where they are known, no classes; a sample without a key.

    Source: An et al., 2020, arXiv:2010.05222; the margins' papers.

    >>> import jax.numpy as jnp, wholebatch.jax as wbj
    >>> x = jnp.eye(3, 4)
    >>> print(f"{wbj.partial_fc_loss(x, jnp.arange(3), x, margin=wbj.CosFace(4.0, 0.5)):.4f}")
    0.2395
    """
    loss = _PartialFC(margin, sample_rate, ignore_index, Options(reduction, exchange, tile, memory))
    rows = loss.check(key, embeddings=embeddings, labels=labels, centers=centers, weights=weights)
    checks.classes(labels, len(rows["centers"]), ignore_index)
    return on_mesh(loss, rows, key, mesh=mesh, axis=axis, per_row="embeddings" if reduction == "none" else None)


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
    memory: Memory = "flat",
    tile: int = 1024,
) -> Array:
    """:func:`partial_fc_loss` inside of a `jax.shard_map` (with `check_vma=True`, its default), of each device's rows.

    Args:
        embeddings: (b, d), this device's rows; as many on each.
        labels: (b,).
        centers: (C_r, d), of this device's classes, the index-th C_r; as many on each.
        axis_name: the axis, or axes, over which both are split.
        margin: phi and s.
        sample_rate: the share of classes that are drawn as negatives.
        key: the same on all devices.
        ignore_index: a label that says that there is none.
        weights: (b,).
        reduction: "mean", "sum", or "none": this device's w_i L_i, (b,).
        exchange: "gather", "ring" or "auto".
        memory: "flat", or bytes on each device for products that are kept from forward to backward.
        tile: rows and columns of a tile of S, at most.

    Returns:
        L of the whole batch, the same on each device.
    """
    loss = _PartialFC(margin, sample_rate, ignore_index, Options(reduction, exchange, tile, memory))
    rows = loss.check(key, embeddings=embeddings, labels=labels, centers=centers, weights=weights)
    return loss(in_shard_map(axis_name, rows), rows, key)


@dataclass(frozen=True)
class _PartialFC:
    """The loss of one device's embeddings, for its classes and those of all others."""

    margin: Margin
    sample_rate: float
    ignore_index: int
    options: Options

    def check(self, key: Any, **given: Any) -> dict[str, Any]:
        checks.fraction("sample_rate", self.sample_rate)
        margin = self.margin
        if (
            isinstance(margin, type)
            or not callable(margin)
            or not hasattr(margin, "s")
            or ".heads." in str(type(margin))
        ):
            raise ValueError(f"margin must be such as wholebatch.jax.ArcFace(s=64.0, m=0.5), got {shown(self.margin)}")
        if not isinstance(margin, Hashable):
            raise ValueError(
                "margin must be hashable, for it is part of what is traced: a @dataclass(frozen=True); got "
                f"{shown(margin)}"
            )
        if self.sample_rate < 1 and key is None:
            raise ValueError(f"sample_rate={self.sample_rate} needs key=, a new one of jax.random for each step")
        checks.random_key(key)
        rows = checks.arrays(**given)
        checks.given(labels=rows["labels"])
        checks.integer("ignore_index", self.ignore_index)
        checks.features(embeddings=rows["embeddings"], centers=rows["centers"])
        checks.same_rows(embeddings=rows["embeddings"], labels=rows["labels"], weights=rows["weights"])
        checks.vector(labels=rows["labels"], weights=rows["weights"])
        checks.integers(labels=rows["labels"])
        labels = rows["labels"]
        return rows | {"labels": labels.astype(jnp.promote_types(labels.dtype, jnp.int32))}  # that of places

    def __call__(self, axis: Axis, rows: dict[str, Any], key: Array | None) -> Array:
        (x, power), labels, (centers, _) = moderate(rows["embeddings"]), rows["labels"], moderate(rows["centers"])
        num_classes = rows.get("totals", {}).get("centers", len(centers) * axis.size)
        valid, ids = valid_rows(axis, "embeddings", rows), axis.rows(len(centers))
        counted = labels != self.ignore_index
        counted = counted if valid is None else counted & valid
        sweep = self.options.sweep(axis, x)
        labels = jnp.where(counted, labels, _NO_CLASS)
        local, present = _meet(axis, centers, labels, ring=sweep.exchange == "ring" and axis.size > 1)
        factors = inverse_norms(x), inverse_norms(local)
        angles = angles_of_units(*(of * factor[:, None] for of, factor in zip((x, local), factors, strict=True)))
        targets = self.margin.s * self.margin(angles, norms(x) / power[:, 0])

        live = valid_rows(axis, "centers", rows)
        if self.sample_rate < 1:
            centers, ids, live = self._sample(centers, ids, live, present, key, len(labels) * axis.size)
        plan = Plan(sweep, rows=False, positives=False)
        of_classes = Tower(centers, inverse_norms(centers), Codes(live, itself=ids))
        of_examples = Tower(x, factors[0], Codes(valid, itself=labels))
        _, of = softmax_statistics(plan, of_classes, of_examples, jnp.asarray(self.margin.s, sum_dtype(x)))
        assert of is not None
        losses = jax.nn.softplus(of.lse - targets)
        losses = jnp.where((labels >= 0) & (labels < num_classes), losses, jnp.nan)
        return reduced(axis, losses, rows["weights"], counted, self.options.reduction)

    def _sample(
        self, centers: Array, ids: Array, valid: Array | None, present: Array, key: Any, examples: int
    ) -> tuple[Array, Array, Array]:
        """Centers that take part, their classes, and which of these places are taken: their number has to be fixed."""
        here = len(centers)
        wanted = present | drawn(key, ids, self.sample_rate)
        if valid is not None:
            wanted &= valid
        spread = 8 * sqrt(here * self.sample_rate * (1 - self.sample_rate))  # standard deviations
        room = min(here, ceil(here * self.sample_rate + spread) + min(examples, here))
        _, places = lax.top_k(2 * present.astype(jnp.int32) + wanted, room)
        return centers[places], ids[places], wanted[places]


def drawn(key: Array, ids: Array, rate: float) -> Array:
    """Whether each class is, with probability `rate`: a function of the key and the class alone."""

    def uniform(class_id: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, class_id), dtype=jnp.float32)

    return jax.vmap(uniform)(ids) < rate


def angles_of_units(x: Array, w: Array) -> Array:
    """acos(x . w) of normalized rows, exact to rounding at any angle; without a gradient at 0 and pi themselves.

    theta = 2 atan2(sqrt(|x - w|^2 + r), sqrt(|x + w|^2 + r)),    r = (1 - |x|^2) + (1 - |w|^2), 0 but for short rows.

    Source: Kahan, 2006, How futile are mindless assessments of roundoff, section 12.
    """
    least, missing = (_SAME * jnp.finfo(x.dtype).eps) ** 2, lacking(x, w)

    def length(z: Array) -> Array:
        squares = (z * z).sum(1) + missing
        return jnp.where(squares > least, jnp.sqrt(jnp.where(squares > least, squares, 1)), 0)

    apart, together = length(x - w), length(x + w)
    return 2 * jnp.arctan2(apart, together)


def _meet(axis: Axis, centers: Array, labels: Array, *, ring: bool) -> tuple[Array, Array]:
    """Of each row its class's center, (b, d), wherever that is, and zeros where there is none; and of each center here
    whether some device has an example of its class. Labels go to all devices once.
    """
    here, first = len(centers), axis.index * len(centers)

    def visit(present: Array, labels: Array) -> tuple[Array, Array]:
        places = _place(labels, first, here)
        return present.at[places].set(True, mode="drop"), centers.at[places].get(mode="fill", fill_value=0)

    (nobody,) = vary_alike(jnp.zeros(here, bool), axis=axis)
    if not ring:
        present, found = visit(nobody, axis.gather(labels))
        return axis.scatter_sum(found), present

    def step(so_far: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
        present, *traveling = so_far
        labels, found = axis.take_from(traveling, 1)
        present, more = visit(present, labels)
        return (present, labels, found + more), None

    present, found = visit(nobody, labels)
    start = vary_alike(present, labels, found, axis=axis)
    (present, _, found), _ = lax.scan(step, start, None, length=axis.size - 1)
    return axis.take_from(found, 1), present


def _place(labels: Array, first: Array, here: int) -> Array:
    """Of each class the row among a device's, and beyond them if it is another device's."""
    places = labels - first
    return jnp.where((places >= 0) & (places < here), places, here)
