"""Bad inputs for `wholebatch.jax`: right calls of its losses and margins, and arrays for the pool."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import inputs_calls
import jax.numpy as jnp
import numpy as np
from inputs_legal import LEGAL
from inputs_pool import POOL

import wholebatch as wb

VALUES: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(
        ("image_features", "text_features", "queries", "keys", "z0", "z1", "features", "embeddings"),
        lambda: np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32),
    ),
    "centers": lambda: np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32),
    "labels": lambda: np.array([0, 0, 1, 2]),
}
ARRAYS: dict[str, Callable[[], Any]] = {
    "j_scalar": lambda: jnp.float32(0.5),
    "j_4": lambda: jnp.ones(4),
    "j_4_int": lambda: jnp.array([0, 0, 1, 1]),
    "j_4_bool": lambda: jnp.array([True, False, True, False]),
    "j_4x3": lambda: jnp.ones((4, 3)),
    "j_4x3_int": lambda: jnp.ones((4, 3), int),
    "j_4x3_half": lambda: jnp.ones((4, 3), jnp.float16),
    "j_4x3_complex": lambda: jnp.ones((4, 3), complex),
    "j_5x3": lambda: jnp.ones((5, 3)),
    "j_0x3": lambda: jnp.ones((0, 3)),
    "j_4x2x3": lambda: jnp.ones((4, 2, 3)),
}
MARGINS = ("ArcFace", "CosFace", "NormFace", "SphereFace")
_FEATURES = "j_4x3 np_matrix np_like"
MORE_LEGAL = {
    **dict.fromkeys(("image_features", "text_features", "z0", "z1", "queries", "features", "embeddings"), _FEATURES),
    **dict.fromkeys(("keys", "info_nce_loss.keys"), f"{_FEATURES} j_5x3"),
    "negatives": f"{_FEATURES} j_5x3 j_0x3",
    "hard_negatives": "j_4x2x3",
    "centers": f"{_FEATURES} j_5x3",
    **dict.fromkeys(("ids", "query_ids", "key_ids", "labels"), "j_4_int np_integers"),
    "weights": "j_4 j_4_int j_4_bool np_integers",
    **dict.fromkeys(("logit_scale", "logit_bias", "temperature"), "j_scalar np_float32 np_int64"),
    **dict.fromkeys(("sample_rate", "label_smoothing"), "np_float32"),
    "tile": "one three enum np_int64",
    "memory": "zero np_int64",
    "ignore_index": "np_int64",
    "axis": "no number_string nul_string long_string word strings",  # an axis of the mesh, if there is one
    "reduction": "word",
}


def module() -> ModuleType:
    """Prepare the tables for wholebatch.jax, with a pool without torch's tensors, and return the module."""
    inputs_calls.VALUES.update(VALUES)
    for kind in [kind for kind in POOL if kind.startswith("t_") or kind in ("tensors", "linear", "optimizer")]:
        del POOL[kind]
    POOL.update(ARRAYS)
    for name, kinds in MORE_LEGAL.items():
        LEGAL[name] = f"{LEGAL.get(name, '')} {kinds}"
    inputs_calls.LEFT_OUT.update(
        {name: "runs inside shard_map" for name in wb.jax.__all__ if name.endswith("_local")}
        | dict.fromkeys(("cache_grad", "cache_train_step", "chunk_encode"), "a transformation of a user's function")
        | dict.fromkeys(("chunked", "grad_cached", "unchunk_args"), "a transformation of a user's function")
        | {f"{name}.__call__": "called by partial_fc_loss" for name in ("CombinedMargin", *MARGINS)}
        | dict.fromkeys(("tree_chunk", "tree_unchunk", "reference"), "a function of trees, which raise clear errors")
    )
    return wb.jax
