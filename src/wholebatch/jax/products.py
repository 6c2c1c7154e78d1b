"""Norms, angles and products of features: inputs in the features' precision, sums in float32 (float64 for float64)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_SMALLEST_NORM = 1e-12
_LARGE = 2.0**20
_SAME = 16  # times eps: unit vectors that are closer to each other are taken to be the same


def sum_dtype(*arrays: Array) -> Any:
    """Return the dtype of sums: float64 if an array has it, else float32."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def moderate(x: Array) -> tuple[Array, Array]:
    """Scale rows that will be normalized by a power of two, and return both; the power has shape (b, 1).

    It scales rows with entries beyond 2^20 down to 2^20 and is 1 for all other rows: neither squares nor products
    overflow then, and normalizing removes it. (Not for short rows, which are divided by 1e-12 and not by their norms;
    they are not scaled.) Derivatives take it for a constant, which is right.
    """
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), -1, keepdims=True).astype(sum_dtype(x))
    largest = jnp.clip(largest, _LARGE, jnp.finfo(largest.dtype).max ** 0.75)
    mantissa, _ = jnp.frexp(largest)
    power = 2 * _LARGE * mantissa / largest
    return x * power.astype(x.dtype), power


def inverse_norms(x: Array) -> Array:
    """Return 1 / max(|x_i|, 1e-12), (b,), of `moderate` rows: the rule of `torch.nn.functional.normalize`.

    The result is in the dtype of sums. Its derivative is that of this function: 0 where a row is shorter than 1e-12.
    """
    squares = (x.astype(sum_dtype(x)) ** 2).sum(-1)
    clamped = squares < _SMALLEST_NORM**2
    return jnp.where(clamped, 1 / _SMALLEST_NORM, lax.rsqrt(jnp.where(clamped, 1, squares)))


def norms(x: Array) -> Array:
    """Return |x_i|, (b,), in the dtype of sums, with derivative 0 at a row of zeros."""
    squares = (x.astype(sum_dtype(x)) ** 2).sum(-1)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def angles_between(x: Array, w: Array) -> Array:
    """Return acos(x . w) of normalized rows, exact to rounding; its gradient at 0 and pi is taken for 0.

    theta = 2 atan2(sqrt(|x - w|^2 + r), sqrt(|x + w|^2 + r)),    r = (1 - |x|^2) + (1 - |w|^2), 0 but for short rows.

    Source: Kahan, 2006, How futile are mindless assessments of roundoff, section 12.
    """
    eps = jnp.finfo(x.dtype).eps
    smallest = (_SAME * eps) ** 2

    def missing(z: Array) -> Array:
        square = 1 - (z * z).sum(-1)
        return jnp.where(square > 16 * eps, square, 0)

    both_missing = missing(x) + missing(w)

    def length(z: Array) -> Array:
        squares = (z * z).sum(1) + both_missing
        return jnp.where(squares > smallest, jnp.sqrt(jnp.where(squares > smallest, squares, 1)), 0)

    apart, together = length(x - w), length(x + w)
    return 2 * jnp.arctan2(apart, together)


def rows_times_rows(x: Array, y: Array) -> Array:
    """Return X Y^T."""
    return _product(x, y, 1, 1)


def per_row_products(x: Array, per_row: Array) -> Array:
    """Return x_i . z_ih, (b, h), for x of shape (b, d) and z, `per_row`, of shape (b, h, d)."""
    return _product(per_row, x, 2, 1, batch=True)


def matrix_times_rows(a: Array, y: Array) -> Array:
    """Return A Y, where A has the dtype of sums."""
    return _product(*_common_dtype(a, y), 1, 0)


def transposed_times_rows(a: Array, x: Array) -> Array:
    """Return A^T X, where A has the dtype of sums."""
    return _product(*_common_dtype(a, x), 0, 0)


def _common_dtype(a: Array, x: Array) -> tuple[Array, Array]:
    """Round A to bfloat16, which has float32's range; widen float16 features, for it would lose A's small entries."""
    return (a.astype(x.dtype), x) if x.dtype == jnp.bfloat16 else (a, x.astype(a.dtype))


def _product(left: Array, right: Array, over_left: int, over_right: int, *, batch: bool = False) -> Array:
    # TPUs and some GPUs multiply float32 in half precision by default. A user who wants that sets JAX's option.
    chosen = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return lax.dot_general(
        left,
        right,
        (((over_left,), (over_right,)), ((0,), (0,)) if batch else ((), ())),
        precision=lax.Precision.HIGHEST if chosen is None and left.dtype == jnp.float32 else None,
        preferred_element_type=sum_dtype(left, right),
    )
