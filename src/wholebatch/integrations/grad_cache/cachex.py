"""The functions for JAX of the package grad_cache, which `wholebatch.jax` has under the same names.

JAX is imported with the first of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

NAMES = {
    "cachex": ("cache_grad", "chunk_encode", "grad_cached", "tree_chunk", "tree_unchunk", "unchunk_args"),
    "cachex.functional": ("cache_grad", "chunk_encode", "grad_cached", "unchunk_args"),
    "cachex.training": ("cache_grad", "cache_train_step", "chunk_encode", "unchunk_args"),
    "cachex.tree_utils": ("tree_chunk", "tree_unchunk"),
}
"""The functions of each of their modules."""


def __getattr__(name: str) -> Any:
    if not any(name in names for names in NAMES.values()):
        raise AttributeError(
            f"wholebatch has no {name} of grad_cache.cachex; its functions for JAX are in wholebatch.jax"
        )
    return getattr(import_module("wholebatch.jax"), name)
