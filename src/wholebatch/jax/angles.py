"""Angles between normalized rows, exact to rounding at any angle."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from .products import missing_square

_SAME = 16  # times eps: unit vectors that are closer to each other are taken to be the same


def angles_between(x: Array, w: Array) -> Array:
    """Return acos(x . w) of normalized rows; its gradient at 0 and pi themselves is taken for 0.

    theta = 2 atan2(sqrt(|x - w|^2 + r), sqrt(|x + w|^2 + r)),    r = (1 - |x|^2) + (1 - |w|^2), 0 but for short rows.

    Source: Kahan, 2006, How futile are mindless assessments of roundoff, section 12.
    """
    smallest, missing = (_SAME * jnp.finfo(x.dtype).eps) ** 2, missing_square(x, w)

    def length(z: Array) -> Array:
        squares = (z * z).sum(1) + missing
        return jnp.where(squares > smallest, jnp.sqrt(jnp.where(squares > smallest, squares, 1)), 0)

    apart, together = length(x - w), length(x + w)
    return 2 * jnp.arctan2(apart, together)
