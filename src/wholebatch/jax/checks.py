"""Mistakes, met where the function is traced: what was expected, what came, and what would mend it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer


def arrays(**given: Any) -> dict[str, Any]:
    """Whatever JAX makes arrays of; None stays None."""
    return {name: None if x is None else jnp.asarray(x) for name, x in given.items()}


def names(of: Any) -> tuple[str, ...]:
    """Several names, of which one alone may be given."""
    return (of,) if isinstance(of, str) else tuple(of)


def options(reduction: Any, exchange: Any, tile: Any, memory: Any = "flat") -> None:
    """What all losses let their caller choose."""
    choice("reduction", reduction, ("mean", "sum", "none"))
    choice("exchange", exchange, ("auto", "gather", "ring"))
    if not isinstance(tile, int) or tile < 1:
        raise ValueError(f"tile must be an integer >= 1, got {tile!r}")
    if memory != "flat" and (not isinstance(memory, int) or memory < 0):
        raise ValueError(f"memory must be 'flat' or a number of bytes >= 0, got {memory!r}")


def features(**towers: Any) -> None:
    """Matrices of one float dtype and one width, with at least one row."""
    first, expected = next(iter(towers.items()))
    for name, x in towers.items():
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"{name} must have shape (rows, features), neither of them 0; got {shape}")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {dtype}")
        if shape[1] != expected.shape[1]:
            raise ValueError(
                f"{first} and {name} must have the same feature size, got {expected.shape} and {shape}; project both "
                "towers to one width"
            )
        if dtype != expected.dtype:
            raise ValueError(f"{first} and {name} must have the same dtype, got {expected.dtype} and {dtype}")


def same_rows(**arrays: Any) -> None:
    """One row for each row of the first."""
    given = {name: x for name, x in arrays.items() if x is not None}
    first, expected = next(iter(given.items()))
    for name, x in given.items():
        if jnp.ndim(x) == 0 or len(x) != len(expected):
            raise ValueError(
                f"{name} must have one row for each row of {first}, got shapes {jnp.shape(x)} and {expected.shape}"
            )


def integers(**arrays: Any) -> None:
    """Of ids and labels."""
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(
                f"{name} must be integers, got {jnp.result_type(x)}; number them, or cast them if they are"
            )


def vector(**arrays: Any) -> None:
    """One number for each row."""
    for name, x in arrays.items():
        if x is not None and jnp.ndim(x) != 1:
            raise ValueError(f"{name} must have shape (rows,), got {jnp.shape(x)}")


def scalar(*, positive: bool = False, **numbers: Any) -> None:
    """Of shape (); positive where its value is known."""
    for name, x in numbers.items():
        if jnp.shape(x) not in ((), (1,)) or not jnp.issubdtype(jnp.result_type(x), jnp.number):
            raise ValueError(f"{name} must be a number or an array of shape (), got {jnp.result_type(x)}{jnp.shape(x)}")
        if positive and not isinstance(x, Tracer) and not np.all(np.asarray(x) > 0):
            raise ValueError(f"{name} must be positive, got {x}")


def choice(name: str, value: Any, among: tuple[Any, ...]) -> None:
    """One of a few."""
    if value not in among:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, among))}; got {value!r}")


def fraction(name: str, value: Any) -> None:
    """Within [0, 1]."""
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number within [0, 1], got {value!r}")


def as_scalar(x: Any, dtype: Any) -> Array:
    """Of shape (), in the dtype of sums."""
    return jnp.reshape(jnp.asarray(x, dtype), ())
