"""The arguments of InfoNCE: checks of shapes and ids, and default ids."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from .._base.settings import check_choice
from . import checks
from .mesh import replicated

Direction = Literal["query_to_key", "key_to_query"]
DIRECTIONS = ("query_to_key", "key_to_query")
PartitionOf = Literal["joint", "per_direction"]
PARTITIONS = ("joint", "per_direction")

_IDS_OF = {"key_ids": "keys", "negative_ids": "negatives", "hard_negative_ids": "hard_negatives"}


def check_directions(directions: tuple[str, ...]) -> None:
    """Raise ValueError unless the directions are one of two, or both."""
    for direction in directions:
        check_choice("directions", direction, DIRECTIONS)
    if not directions or len(set(directions)) < len(directions):
        raise ValueError(f"directions must name one of {', '.join(map(repr, DIRECTIONS))}, or both; got {directions}")


def checked_inputs(**arguments: Any) -> dict[str, Any]:
    """Check the arguments that have rows, and return them as `_split` does."""
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
    for name, owner in _IDS_OF.items():
        if rows[name] is None:
            continue
        if rows[owner] is None:
            raise ValueError(f"{name} were given without {owner}; give both, or neither")
        if (got := rows[name].shape) != (shape := rows[owner].shape[:-1]):
            raise ValueError(f"{name} must have one id for each of {owner}, {shape}; got {got}")
    return _split(rows)


def _split(rows: dict[str, Any]) -> dict[str, Any]:
    """Move the keys beyond the queries' to "more_keys", and complete the ids, so that all have them or none has.

    Ids of queries or keys that are not given are those of the partner. Negatives without ids have an id that no query
    has.
    """
    keys, b = rows["keys"], len(rows["queries"])
    if len(keys) > b:
        keys = replicated(keys)
    has_extra = len(keys) > b
    ids = _complete_ids(rows, b, len(keys))
    return {
        **rows,
        **ids,
        "keys": keys[:b] if has_extra else keys,
        "more_keys": keys[b:] if has_extra else None,
        "more_key_ids": ids["more_key_ids"] if has_extra else None,
    }


def _complete_ids(rows: dict[str, Any], b: int, num_keys: int) -> dict[str, Any]:
    """Return the ids of queries, keys, further keys, and negatives, in one dtype; None for all if none are compared."""
    query_ids, key_ids = rows["query_ids"], rows["key_ids"]
    ids = {name: x for name, x in rows.items() if name.endswith("_ids") and x is not None}
    if query_ids is None and key_ids is None:
        if ids:
            raise ValueError(f"{next(iter(ids))} have nothing to be compared with; give query_ids or key_ids as well")
        return dict.fromkeys(("query_ids", "key_ids", "more_key_ids", "negative_ids", "hard_negative_ids"))
    dtype = jnp.result_type(*(x.dtype for x in ids.values()))
    if not jnp.issubdtype(dtype, jnp.integer):
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in ids.items())
        raise ValueError(f"ids must have dtypes of which one holds the others, got {dtypes}; cast them to one dtype")
    bounds = jnp.iinfo(dtype)
    no_id = bounds.min if bounds.min else bounds.max

    def without_id(rows: int) -> Array:
        return jnp.full(rows, no_id, dtype)

    negatives, negative_ids, hard_negative_ids = (
        rows[name] for name in ("negatives", "negative_ids", "hard_negative_ids")
    )
    if negatives is not None and negative_ids is None:
        negative_ids = without_id(len(negatives))
    return {
        "query_ids": (key_ids[:b] if query_ids is None else query_ids).astype(dtype),
        "key_ids": (query_ids if key_ids is None else key_ids[:b]).astype(dtype),
        "more_key_ids": without_id(num_keys - b) if key_ids is None else key_ids[b:].astype(dtype),
        "negative_ids": None if negative_ids is None else negative_ids.astype(dtype),
        "hard_negative_ids": None if hard_negative_ids is None else hard_negative_ids.astype(dtype),
    }
