"""Products of features: in the precision that they have, summed in float32 (float64 for float64)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_LEAST_NORM = 1e-12


def sum_dtype(*arrays: Array) -> Any:
    """float64 if something is, float32 otherwise."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def inverse_norms(x: Array) -> Array:
    """1 / |x_i|, (b,), in the dtype of sums; of a row of zeros 1e12, as `torch.nn.functional.normalize` has it."""
    squares = (x.astype(sum_dtype(x)) ** 2).sum(-1)
    norms = jnp.sqrt(jnp.where(squares > 0, squares, 1))  # whose derivative at 0 is infinite
    return 1 / jnp.where(squares > 0, jnp.maximum(norms, _LEAST_NORM), _LEAST_NORM)


def rows_times_rows(x: Array, y: Array) -> Array:
    """X Y^T."""
    return _product(x, y, 1, 1)


def rows_times_own(x: Array, own: Array) -> Array:
    """x_i . own_ih, (b, h), of (b, d) and (b, h, d)."""
    return _product(own, x, 2, 1, batch=True)


def matrix_times_rows(a: Array, y: Array) -> Array:
    """A Y, with A in the dtype of sums."""
    return _product(*_of_one_dtype(a, y), 1, 0)


def transposed_times_rows(a: Array, x: Array) -> Array:
    """A^T X, with A in the dtype of sums."""
    return _product(*_of_one_dtype(a, x), 0, 0)


def _of_one_dtype(a: Array, x: Array) -> tuple[Array, Array]:
    """Bfloat16 has float32's range, and A is rounded to it; in float16 small entries would be lost: X is widened."""
    return (a.astype(x.dtype), x) if x.dtype == jnp.bfloat16 else (a, x.astype(a.dtype))


def _product(one: Array, other: Array, over_one: int, over_other: int, *, batch: bool = False) -> Array:
    # TPUs and some GPUs multiply float32 in half precision unless told otherwise. Who wants that says so to JAX.
    chosen = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return lax.dot_general(
        one,
        other,
        (((over_one,), (over_other,)), ((0,), (0,)) if batch else ((), ())),
        precision=lax.Precision.HIGHEST if chosen is None and one.dtype == jnp.float32 else None,
        preferred_element_type=sum_dtype(one, other),
    )
