"""InfoNCE: the key of each query against all keys and negatives of the global batch, on any number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp
from jax.sharding import AbstractMesh, Mesh

from .._base.settings import check_choice
from . import checks
from .axis import Axis
from .mesh import AxisNames, in_shard_map, on_mesh, replicated, valid_rows
from .options import ExchangeName, Memory, Options
from .pairs import Codes, Tower, concatenated
from .products import per_row_products, sum_dtype
from .reduction import Reduction, cross_entropy, reduce_losses
from .softmax import RowStatistics, SoftmaxPlan, softmax_statistics

Direction = Literal["query_to_key", "key_to_query"]
DIRECTIONS = ("query_to_key", "key_to_query")
PartitionOf = Literal["joint", "per_direction"]

_OWNERS_OF_IDS = {"key_ids": "keys", "negative_ids": "negatives", "hard_negative_ids": "hard_negatives"}


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
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    r"""Cross-entropy of each query's own key among the keys and negatives of all devices, with its exact gradient.

    S = logit_scale * Q [K; N]^T,    L = CE(S, i)

    Args:
        queries: Q, (B, d), a global array, as it is: the caller normalizes. float64, float32, bfloat16 or float16.
        keys: K, (B, d) or more rows; row i is the positive of query i, rows from B on are negatives.
        logit_scale: multiplies the similarities (1 / temperature); a scalar.
        negatives: N, (n, d), further keys that are nobody's positive, such as mined hard negatives; they count for all
            queries.
        hard_negatives: (B, h, d), each query's own, which count for it alone.
        query_ids: (B,) integers, any but the smallest of their dtype, or the largest if it is unsigned; a key with a
            query's id is no negative of it. Default: those of the queries' keys.
        key_ids: of the keys, (rows of keys,). Default: those of their queries.
        negative_ids: of the negatives, (n,). Default: none of them is excluded.
        hard_negative_ids: of the hard negatives, (B, h). Default: none of them is excluded.
        directions: "query_to_key", "key_to_query" (each key's query among the queries of all devices), or both.
        partition: "joint": one softmax over both directions, in which the pair counts twice. "per_direction": one
            softmax for each, and L_i their mean.
        label_smoothing: weight of the uniform distribution over all candidates.
        weights: (B,), of the examples, >= 0; the mean is sum w_i L_i / sum w_i.
        reduction: "mean", "sum", or "none": w_i L_i, (B,), split over the axis.
        mesh: the devices, as in :func:`wholebatch.jax.clip_loss`.
        axis: the axis of the mesh over which rows are split; several names are used as one axis.
        exchange: "gather", "ring" or "auto", as there; the queries travel, or keys and negatives, whichever are fewer.
        memory: "flat", "auto" or bytes, as there, of Q [K; N]^T.
        tile: rows and columns of a tile of S, at most; None: as many as `memory` allows.

    Returns:
        L, a scalar, the same on every device: the value of `wholebatch.jax.reference.info_nce_loss` on the whole batch.

    Work, memory and collectives: as in :func:`wholebatch.jax.clip_loss`, with B keys and n negatives instead of B
    texts.

    Raises:
        ValueError: while tracing: as :func:`wholebatch.jax.clip_loss`; also fewer keys than queries, and ids of an
            argument that is not given.
        NotImplementedError: if the gradient is differentiated again.

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
    return on_mesh(loss, rows, logit_scale, mesh=mesh, axis=axis, per_row=reduction == "none")


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
    memory: Memory = "auto",
    tile: int | None = None,
) -> Array:
    """:func:`info_nce_loss` of each device's rows, inside of a `jax.shard_map` (with `check_vma=True`, its default).

    Takes what :func:`info_nce_loss` takes, of this device: queries (b, d), keys (b, d) or more rows, of which those
    from b on are negatives, L_i (b,); as many rows on each device. In place of `mesh` and `axis` it takes `axis_name`,
    the axis over which rows are split; several names are used as one axis.

    Returns:
        L of the whole batch, the same on every device.

    Raises:
        ValueError: as :func:`info_nce_loss`; also rows that JAX does not know to vary over the axis.
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
    """The loss of one device's queries among the keys of all devices."""

    directions: tuple[str, ...]
    partition: PartitionOf
    label_smoothing: float
    options: Options

    def check(self, logit_scale: Any, **arguments: Any) -> dict[str, Any]:
        for direction in self.directions:
            check_choice("directions", direction, DIRECTIONS)
        if not self.directions or len(set(self.directions)) < len(self.directions):
            names = ", ".join(map(repr, DIRECTIONS))
            raise ValueError(f"directions must name one of {names}, or both; got {self.directions}")
        check_choice("partition", self.partition, ("joint", "per_direction"))
        checks.fraction("label_smoothing", self.label_smoothing)
        checks.scalar(logit_scale=logit_scale)
        return _checked_inputs(**arguments)

    def __call__(self, axis: Axis, rows: dict[str, Any], logit_scale: Any) -> Array:
        q, valid = rows["queries"], valid_rows(axis, "queries", rows)
        b, example = len(q), axis.rows(len(q))
        scale = checks.as_scalar(logit_scale, sum_dtype(q))
        queries = Tower(q, None, Codes(valid, pair=example, same=rows["query_ids"]))
        keys = Tower(rows["keys"], None, Codes(valid, pair=example, same=rows["key_ids"]))
        for name, ids in (("more_keys", "more_key_ids"), ("negatives", "negative_ids")):
            if rows[name] is not None and len(rows[name]):
                keys = concatenated(keys, _negatives(axis, rows, name, ids))
        to_keys, to_queries = (direction in self.directions for direction in DIRECTIONS)
        smooth = self.label_smoothing > 0
        if b >= len(keys.features):
            plan = SoftmaxPlan(self.options.sweep(axis, q, keys.features), rows=to_keys, cols=to_queries, smooth=smooth)
            query_statistics, key_statistics = softmax_statistics(plan, queries, keys, scale)
        else:  # queries are fewer: they travel
            plan = SoftmaxPlan(self.options.sweep(axis, keys.features, q), rows=to_queries, cols=to_keys, smooth=smooth)
            key_statistics, query_statistics = softmax_statistics(plan, keys, queries, scale)
        if query_statistics is not None and rows["hard_negatives"] is not None:
            query_statistics = _with_hard_negatives(query_statistics, rows, scale)
        if key_statistics is not None:
            key_statistics = jax.tree.map(lambda x: x[:b], key_statistics)
        sides = [side for side in (query_statistics, key_statistics) if side is not None]
        if self.partition == "joint" and len(sides) == 2:
            sides = [_joint(*sides)]
        losses = [cross_entropy(side, self.label_smoothing) for side in sides]
        return reduce_losses(axis, jnp.mean(jnp.stack(losses), 0), rows["weights"], valid, self.options.reduction)


def _negatives(axis: Axis, rows: dict[str, Any], name: str, ids: str) -> Tower:
    no_pair = jnp.full(len(rows[name]), -1, jnp.int32)
    return Tower(rows[name], None, Codes(valid_rows(axis, name, rows), pair=no_pair, same=rows[ids]))


def _with_hard_negatives(statistics: RowStatistics, rows: dict[str, Any], scale: Array) -> RowStatistics:
    """Add each query's own negatives to its softmax."""
    q, hard, ids = rows["queries"], rows["hard_negatives"], rows["hard_negative_ids"]
    logits = scale * per_row_products(q, hard)
    candidates = jnp.ones_like(logits, bool) if ids is None else ids != rows["query_ids"][:, None]
    lse = jnp.logaddexp(statistics.lse, logsumexp(jnp.where(candidates, logits, -jnp.inf), 1))
    combined = statistics._replace(lse=lse)
    if statistics.all_logits is not None and statistics.num is not None:
        all_logits = statistics.all_logits + jnp.where(candidates, logits, 0).sum(1)
        combined = combined._replace(all_logits=all_logits, num=statistics.num + candidates.sum(1))
    return combined


def _joint(first: RowStatistics, other: RowStatistics) -> RowStatistics:
    """Return the statistics of one softmax over the candidates of both."""
    sums = [None if a is None or b is None else a + b for a, b in zip(first[1:], other[1:], strict=True)]
    joint = RowStatistics(jnp.logaddexp(first.lse, other.lse), *sums)
    return joint._replace(num_positives=jnp.full_like(joint.lse, 2))


# The arguments that have rows.


def _checked_inputs(**arguments: Any) -> dict[str, Any]:
    """Check the arguments that have rows; return them with the keys beyond the queries' as "more_keys"."""
    rows = checks.arrays(**arguments)
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
    for name, owner in _OWNERS_OF_IDS.items():
        if rows[name] is None:
            continue
        if rows[owner] is None:
            raise ValueError(f"{name} were given without {owner}; give both, or neither")
        if (got := rows[name].shape) != (shape := rows[owner].shape[:-1]):
            raise ValueError(f"{name} must have one id for each of {owner}, {shape}; got {got}")
    if len(k) > (b := len(q)):
        rows |= {name: replicated(rows[name]) for name in ("keys", "key_ids") if rows[name] is not None}
    rows |= _completed_ids(rows) | {"more_keys": None}
    if len(k) > b:
        rows |= {"keys": rows["keys"][:b], "more_keys": rows["keys"][b:]}
    return rows


def _completed_ids(rows: dict[str, Any]) -> dict[str, Array | None]:
    """Return the ids of queries, keys, further keys, and negatives, in one dtype; none if none are compared.

    Ids of queries or keys that are not given are those of the partner. Further keys and negatives without ids have an
    id that no query has.
    """
    query_ids, key_ids, negative_ids = (rows[name] for name in ("query_ids", "key_ids", "negative_ids"))
    ids = {name: x for name, x in rows.items() if name.endswith("_ids") and x is not None}
    if query_ids is None and key_ids is None:
        if ids:
            raise ValueError(f"{next(iter(ids))} have nothing to be compared with; give query_ids or key_ids as well")
        return {"more_key_ids": None}
    dtype = jnp.result_type(*(x.dtype for x in ids.values()))
    if not jnp.issubdtype(dtype, jnp.integer):
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in ids.items())
        raise ValueError(f"ids must have dtypes of which one holds the others, got {dtypes}; cast them to one dtype")
    bounds = jnp.iinfo(dtype)
    no_id = bounds.min if bounds.min else bounds.max

    b, more = len(rows["queries"]), len(rows["keys"]) - len(rows["queries"])
    more_key_ids = None
    if more:
        more_key_ids = jnp.full(more, no_id, dtype) if key_ids is None else key_ids[b:]
    if rows["negatives"] is not None and negative_ids is None:
        negative_ids = jnp.full(len(rows["negatives"]), no_id, dtype)
    completed = {
        "query_ids": key_ids[:b] if query_ids is None else query_ids,
        "key_ids": query_ids if key_ids is None else key_ids[:b],
        "more_key_ids": more_key_ids,
        "negative_ids": negative_ids,
        "hard_negative_ids": rows["hard_negative_ids"],
    }
    return {name: None if x is None else x.astype(dtype) for name, x in completed.items()}
