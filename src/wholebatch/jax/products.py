"""Products of features: in the precision that they have, summed in float32 (float64 for float64)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_LEAST_NORM = 1e-12
_LARGE = 2.0**20


def sum_dtype(*arrays: Array) -> Any:
    """float64 if something is, float32 otherwise."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def moderate(x: Array) -> tuple[Array, Array]:
    """Rows that are to be normalized, and the power of two, (b, 1), by which they have been multiplied.

    It brings entries beyond 2^20 to 2^20 and is 1 for all other rows: neither squares nor products overflow then, and
    normalizing does not see it. (Short rows do: they are divided by 1e-12 and not by their norms.) To derivatives it is
    a constant, which is right.
    """
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), -1, keepdims=True).astype(sum_dtype(x))
    largest = jnp.clip(largest, _LARGE, jnp.finfo(largest.dtype).max ** 0.75)
    mantissa, _ = jnp.frexp(largest)
    power = 2 * _LARGE * mantissa / largest
    return x * power.astype(x.dtype), power


def inverse_norms(x: Array) -> Array:
    """1 / max(|x_i|, 1e-12), (b,), of `moderate` rows in the dtype of sums: `torch.nn.functional.normalize`'s rule.

    Its derivative is that of this function: 0 where a row is shorter than 1e-12.
    """
    squares = (x.astype(sum_dtype(x)) ** 2).sum(-1)
    clamped = squares < _LEAST_NORM**2
    return jnp.where(clamped, 1 / _LEAST_NORM, lax.rsqrt(jnp.where(clamped, 1, squares)))


def norms(x: Array) -> Array:
    """|x_i|, (b,), in the dtype of sums; with derivative 0 at a row of zeros."""
    squares = (x.astype(sum_dtype(x)) ** 2).sum(-1)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def lacking(*units: Array) -> Array:
    """What normalized rows lack to squared norm 1, all together, (b,): 0 but for rows that were shorter than 1e-12."""
    missing = [1 - (z * z).sum(-1) for z in units]
    return sum((jnp.where(m > 16 * jnp.finfo(m.dtype).eps, m, 0) for m in missing), start=jnp.zeros_like(missing[0]))


def rows_times_rows(x: Array, y: Array) -> Array:
    """X Y^T."""
    return _product(x, y, 1, 1)


def rows_times_own(x: Array, local: Array) -> Array:
    """x_i . own_ih, (b, h), of (b, d) and (b, h, d)."""
    return _product(local, x, 2, 1, batch=True)


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
