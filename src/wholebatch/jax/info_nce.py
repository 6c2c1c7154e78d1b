"""InfoNCE: each query's own key, to be found among the keys and negatives of all devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp
from jax.sharding import AbstractMesh, Mesh

from . import checks
from .axis import Axis
from .exchange import Memory
from .mesh import AxisNames, in_shard_map, on_mesh, together, valid_rows
from .options import ExchangeName, Options
from .products import rows_times_own, sum_dtype
from .reduction import Reduction, cross_entropy, reduced
from .softmax import Codes, Plan, Statistics, Tower, softmax_statistics

Direction = Literal["query_to_key", "key_to_query"]
PartitionOf = Literal["joint", "per_direction"]
DIRECTIONS = ("query_to_key", "key_to_query")


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
    directions: Sequence[Direction] = ("query_to_key",),
    partition: PartitionOf = "joint",
    label_smoothing: float = 0.0,
    weights: Array | None = None,
    reduction: Reduction = "mean",
    mesh: Mesh | AbstractMesh | None = None,
    axis: AxisNames = "data",
    exchange: ExchangeName = "auto",
    memory: Memory = "flat",
    tile: int = 1024,
) -> Array:
    r"""Cross-entropy of each query's own key among the keys and negatives of all devices, with its exact gradient.

    S = logit_scale * Q [K; N]^T,    L = CE(S, i)

    Args:
        queries: Q, (B, d), a global array, as it is: the caller normalizes.
        keys: K, (B, d) or more rows; row i is the positive of query i, rows from B on are negatives.
        logit_scale: multiplies the similarities (1 / temperature); a scalar.
        negatives: N, (n, d), further keys that are nobody's positive; they count for all queries.
        hard_negatives: (B, h, d), each query's own, which count for it alone.
        query_ids: (B,) integers, any but the least of their dtype, or the largest if that is unsigned; a key with a
            query's id is no negative of it.
            Default: those of the queries' keys.
        key_ids: of the keys, (rows of keys,). Default: those of their queries.
        negative_ids: of the negatives, (n,). Default: none of them is left out.
        hard_negative_ids: of the hard negatives, (B, h). Default: none of them is left out.
        directions: "query_to_key", "key_to_query" (each key's query among the queries of all devices), or both.
        partition: "joint": one softmax over both directions, in which the pair counts twice. "per_direction": one for
            each, and L_i their mean.
        label_smoothing: weight of the uniform distribution over all candidates.
        weights: (B,), of the examples, >= 0; the mean is sum w_i L_i / sum w_i.
        reduction: "mean", "sum", or "none": w_i L_i, (B,), split over the axis.
        mesh: the devices; None: the mesh of `jax.set_mesh`, and without one the batch is in one piece.
        axis: of the mesh, over which rows are split; several names are taken as one.
        exchange: "gather", "ring" or "auto", for the queries or for keys and negatives, whichever are fewer.
        memory: "flat", or bytes on each device for products that are kept from forward to backward.
        tile: rows and columns of a tile of S, at most.

    Returns:
        L, the value of `wholebatch.jax.reference.info_nce_loss` on the whole batch.

    The gradient, work and collectives are as in :func:`wholebatch.jax.clip_loss`, with B keys and n negatives in the
    place of B texts.

    Raises:
        ValueError: while tracing: shapes, dtypes, an option or an axis that does not exist;
            fewer keys than queries, ids of what is not given.

    Source: van den Oord et al., 2018, arXiv:1807.03748, equation 4; with in-batch negatives, Karpukhin et al., 2020,
    arXiv:2004.04906, equation 2.

    >>> import jax.numpy as jnp, wholebatch.jax as wbj
    >>> q = jnp.eye(3)
    >>> print(f"{wbj.info_nce_loss(q, q, logit_scale=10.0, negatives=-q):.1e}")
    1.8e-04
    """
    loss = _InfoNCE(
        checks.names(directions, "directions"), partition, label_smoothing, Options(reduction, exchange, tile, memory)
    )
    rows = loss.check(
        logit_scale,
        queries=queries,
        keys=keys,
        negatives=negatives,
        hard_negatives=hard_negatives,
        query_ids=query_ids,
        key_ids=key_ids,
        negative_ids=negative_ids,
        hard_negative_ids=hard_negative_ids,
        weights=weights,
    )
    per_row = "queries" if reduction == "none" else None
    return on_mesh(loss, rows, logit_scale, mesh=mesh, axis=axis, per_row=per_row)


def info_nce_loss_local(
    queries: Array,
    keys: Array,
    *,
    logit_scale: Array | float,
    axis_name: AxisNames,
    negatives: Array | None = None,
    hard_negatives: Array | None = None,
    query_ids: Array | None = None,
    key_ids: Array | None = None,
    negative_ids: Array | None = None,
    hard_negative_ids: Array | None = None,
    directions: Sequence[Direction] = ("query_to_key",),
    partition: PartitionOf = "joint",
    label_smoothing: float = 0.0,
    weights: Array | None = None,
    reduction: Reduction = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "flat",
    tile: int = 1024,
) -> Array:
    """:func:`info_nce_loss` inside of a `jax.shard_map` (with `check_vma=True`, its default), of each device's rows.

    Args:
        queries: Q_r, (b, d), this device's rows; as many on each.
        keys: K_r, (b, d) or more rows; those from b on are negatives.
        logit_scale: the same on all devices.
        axis_name: the axis, or axes, over which rows are split.
        negatives: N_r, (n_r, d).
        hard_negatives: (b, h, d).
        query_ids: (b,), and other ids likewise of this device's rows.
        key_ids: of the keys.
        negative_ids: of the negatives.
        hard_negative_ids: (b, h).
        directions: "query_to_key", "key_to_query", or both.
        partition: "joint" or "per_direction".
        label_smoothing: weight of the uniform distribution in the targets.
        weights: (b,).
        reduction: "mean", "sum", or "none": this device's w_i L_i, (b,).
        exchange: "gather", "ring" or "auto".
        memory: "flat", or bytes on each device for products that are kept from forward to backward.
        tile: rows and columns of a tile of S, at most.

    Returns:
        L of the whole batch, the same on each device.
    """
    loss = _InfoNCE(
        checks.names(directions, "directions"), partition, label_smoothing, Options(reduction, exchange, tile, memory)
    )
    rows = loss.check(
        logit_scale,
        queries=queries,
        keys=keys,
        negatives=negatives,
        hard_negatives=hard_negatives,
        query_ids=query_ids,
        key_ids=key_ids,
        negative_ids=negative_ids,
        hard_negative_ids=hard_negative_ids,
        weights=weights,
    )
    return loss(in_shard_map(axis_name, rows), rows, logit_scale)


@dataclass(frozen=True)
class _InfoNCE:
    """The loss of one device's queries among the keys of all."""

    directions: tuple[str, ...]
    partition: PartitionOf
    label_smoothing: float
    options: Options

    def check(self, logit_scale: Any, **given: Any) -> dict[str, Any]:
        """The arguments; with keys beyond the queries' among the negatives, and ids of all or of none."""
        for direction in self.directions:
            checks.choice("directions", direction, DIRECTIONS)
        if not self.directions or len(set(self.directions)) < len(self.directions):
            raise ValueError(
                f"directions must name one of {', '.join(map(repr, DIRECTIONS))}, or both; got {self.directions}"
            )
        checks.choice("partition", self.partition, ("joint", "per_direction"))
        checks.fraction("label_smoothing", self.label_smoothing)
        checks.scalar(logit_scale=logit_scale)
        rows = checks.arrays(**given)
        q, k, n, hard = (rows[name] for name in ("queries", "keys", "negatives", "hard_negatives"))
        checks.features(queries=q, keys=k, **({} if n is None or n.shape == (0, k.shape[-1]) else {"negatives": n}))
        if len(k) < len(q):
            raise ValueError(
                f"keys must have at least as many rows as queries, got {len(k)} and {len(q)}; key i is the positive of "
                "query i"
            )
        checks.same_rows(queries=q, query_ids=rows["query_ids"], hard_negatives=hard, weights=rows["weights"])
        if hard is not None and (hard.ndim != 3 or hard.shape[2] != q.shape[1]):
            raise ValueError(f"hard_negatives must have shape ({len(q)}, h, {q.shape[1]}), got {hard.shape}")
        if hard is not None and hard.size:
            checks.features(queries=q, hard_negatives=hard.reshape(-1, q.shape[1]))
        ids = {name: rows[name] for name in rows if name.endswith("_ids")}
        checks.integers(**ids)
        checks.vector(**{name: x for name, x in ids.items() if not name.startswith("hard")}, weights=rows["weights"])
        for name, of in (("key_ids", "keys"), ("negative_ids", "negatives"), ("hard_negative_ids", "hard_negatives")):
            if rows[name] is None:
                continue
            if rows[of] is None:
                raise ValueError(f"{name} were given without {of}")
            if rows[name].shape != rows[of].shape[:-1]:
                raise ValueError(
                    f"{name} must have one id for each of {of}, {rows[of].shape[:-1]}; got {rows[name].shape}"
                )
        return self._split(rows)

    def _split(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Keys that are nobody's positive stand for themselves; ids that are not given are those of the partner."""
        keys, b = rows["keys"], len(rows["queries"])
        if len(keys) > b:
            keys = together(keys)
        query_ids, key_ids, negative_ids = rows["query_ids"], rows["key_ids"], rows["negative_ids"]
        more_ids = None
        if query_ids is None and key_ids is None:
            unused = [name for name in ("negative_ids", "hard_negative_ids") if rows[name] is not None]
            if unused:
                raise ValueError(f"{unused[0]} have nothing to be compared with; give query_ids or key_ids, too")
        else:
            ids = {name: x.dtype for name, x in rows.items() if name.endswith("_ids") and x is not None}
            dtype = jnp.result_type(*ids.values())
            if not jnp.issubdtype(dtype, jnp.integer):
                kinds = ", ".join(f"{name} {of}" for name, of in ids.items())
                raise ValueError(f"ids must have dtypes of which one holds the others, got {kinds}")
            bounds = jnp.iinfo(dtype)
            nobodys = bounds.min if bounds.min else bounds.max

            def of_nobody(rows: int) -> Array:
                return jnp.full(rows, nobodys, dtype)

            more_ids = of_nobody(len(keys) - b) if key_ids is None else key_ids[b:].astype(dtype)
            if rows["negatives"] is not None and negative_ids is None:
                negative_ids = of_nobody(len(rows["negatives"]))
            query_ids, key_ids = (
                (key_ids[:b] if query_ids is None else query_ids).astype(dtype),
                (query_ids if key_ids is None else key_ids[:b]).astype(dtype),
            )
            negative_ids, hard_negative_ids = (
                None if of is None else of.astype(dtype) for of in (negative_ids, rows["hard_negative_ids"])
            )
            rows = rows | {"hard_negative_ids": hard_negative_ids}
        more = len(keys) > b
        return rows | {
            "query_ids": query_ids,
            "keys": keys[:b] if more else keys,
            "key_ids": key_ids,
            "more_keys": keys[b:] if more else None,
            "more_key_ids": more_ids if more else None,
            "negative_ids": negative_ids,
        }

    def __call__(self, axis: Axis, rows: dict[str, Any], logit_scale: Any) -> Array:
        q, valid = rows["queries"], valid_rows(axis, "queries", rows)
        b, example = len(q), axis.rows(len(q))
        scale = checks.as_scalar(logit_scale, sum_dtype(q))
        of_queries = Tower(q, None, Codes(valid, pair=example, same=rows["query_ids"]))
        of_keys = Tower(rows["keys"], None, Codes(valid, pair=example, same=rows["key_ids"]))
        for name, ids in (("more_keys", "more_key_ids"), ("negatives", "negative_ids")):
            if rows[name] is not None and len(rows[name]):
                of_keys = _below(of_keys, _negatives(axis, rows, name, ids))
        to_keys, to_queries = (direction in self.directions for direction in DIRECTIONS)
        smooth = self.label_smoothing > 0
        if b >= len(of_keys.features):
            plan = Plan(self.options.sweep(axis, of_keys.features), rows=to_keys, cols=to_queries, smooth=smooth)
            of_query, of_key = softmax_statistics(plan, of_queries, of_keys, scale)
        else:  # queries are fewer: they travel
            plan = Plan(self.options.sweep(axis, q), rows=to_queries, cols=to_keys, smooth=smooth)
            of_key, of_query = softmax_statistics(plan, of_keys, of_queries, scale)
        if of_query is not None and rows["hard_negatives"] is not None:
            of_query = _with_hard_negatives(of_query, rows, scale)
        if of_key is not None:
            of_key = jax.tree.map(lambda x: x[:b], of_key)
        found = [of for of in (of_query, of_key) if of is not None]
        if self.partition == "joint" and len(found) == 2:
            found = [_joint(*found)]
        losses = [cross_entropy(of, self.label_smoothing) for of in found]
        return reduced(axis, jnp.mean(jnp.stack(losses), 0), rows["weights"], valid, self.options.reduction)


def _negatives(axis: Axis, rows: dict[str, Any], name: str, ids: str) -> Tower:
    nobodys = jnp.full(len(rows[name]), -1, jnp.int32)
    return Tower(rows[name], None, Codes(valid_rows(axis, name, rows), pair=nobodys, same=rows[ids]))


def _below(above: Tower, below: Tower) -> Tower:
    """One tower of both."""
    parts = [of.codes for of in (above, below)]
    valid = None
    if any(codes.valid is not None for codes in parts):
        valid = jnp.concatenate(
            [jnp.ones(len(of.features), bool) if of.codes.valid is None else of.codes.valid for of in (above, below)]
        )
    pair, same = (
        None if getattr(parts[0], name) is None else jnp.concatenate([getattr(codes, name) for codes in parts])
        for name in ("pair", "same")
    )
    return Tower(jnp.concatenate([above.features, below.features]), None, Codes(valid, pair=pair, same=same))


def _with_hard_negatives(of: Statistics, rows: dict[str, Any], scale: Array) -> Statistics:
    """Each query's own negatives are further terms of its softmax."""
    q, hard, ids = rows["queries"], rows["hard_negatives"], rows["hard_negative_ids"]
    logits = scale * rows_times_own(q, hard)
    counted = jnp.ones_like(logits, bool) if ids is None else ids != rows["query_ids"][:, None]
    found = of._replace(lse=jnp.logaddexp(of.lse, logsumexp(jnp.where(counted, logits, -jnp.inf), 1)))
    if of.all_logits is not None and of.num is not None:
        all_logits = of.all_logits + jnp.where(counted, logits, 0).sum(1)
        found = found._replace(all_logits=all_logits, num=of.num + counted.sum(1))
    return found


def _joint(one: Statistics, other: Statistics) -> Statistics:
    """Of one softmax over the candidates of both."""
    sums = [None if a is None or b is None else a + b for a, b in zip(one[1:], other[1:], strict=True)]
    return Statistics(jnp.logaddexp(one.lse, other.lse), *sums)
