"""Checks of arguments, made while a function is traced; errors name the accepted and the given value, and the fix.

All checks run before any array is computed. The values of traced arguments are not known then: only their shapes and
dtypes are checked.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes
from jax.core import Tracer

from .._base.settings import LARGEST, SMALLEST_DIVISOR, check_label, shown

_ARRAYS: Any = (np.generic, np.ndarray, Array)


def arrays(**arguments: Any) -> dict[str, Any]:
    """Convert all arguments to JAX arrays; None stays None.

    Raises:
        ValueError: no array, integers that JAX would truncate, weights that are complex, negative or not finite.
    """
    for name, x in arguments.items():
        if x is not None:
            _check_array(name, x)
        # Features are not copied from a device for a check.
        values = known(x) if name == "weights" or not isinstance(x, Array) else None
        if values is None or not values.size:
            continue
        if np.issubdtype(values.dtype, np.integer):
            smallest, largest = values.min(), values.max()
            bounds = jnp.iinfo(dtypes.canonicalize_dtype(values.dtype))
            if smallest < bounds.min or largest > bounds.max:
                raise ValueError(
                    f"{name} must fit into {bounds.dtype}, got {smallest} to {largest}: renumber them "
                    "(np.unique(..., return_inverse=True)), or give JAX 64 bits (jax_enable_x64)"
                )
        if name == "weights":
            if np.iscomplexobj(values):
                raise ValueError(f"weights must be real, got {values.dtype}")
            if (wrong := values[~(np.isfinite(values) & (values >= 0))]).size:
                raise ValueError(f"weights must be finite and not negative, got {wrong[0]}; 0 leaves a row out")
    return {name: None if x is None else jnp.asarray(x) for name, x in arguments.items()}


def _check_array(name: str, x: Any) -> None:
    """Raise ValueError unless x is an array of numbers, a list of them, or convertible to an array."""
    if isinstance(x, (list, tuple)):
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)):
            return
        try:
            dtype = np.asarray(x).dtype
        except ValueError:  # rows of different lengths
            raise ValueError(f"{name} must be an array with rows of one length, got {shown(x)}") from None
    elif isinstance(x, _ARRAYS):
        dtype = x.dtype
    elif hasattr(type(x), "__jax_array__") or hasattr(type(x), "__array__"):
        return
    else:
        raise ValueError(f"{name} must be an array, got {shown(x)}")
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        raise ValueError(f"{name} must be an array of numbers, got {dtype}")


def known(x: Any) -> np.ndarray[Any, Any] | None:
    """Return the values of x, or None if it is traced or on devices of other processes."""
    if x is None or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)):
        return None
    return None if isinstance(x, Array) and not x.is_fully_addressable else np.asarray(x)


def names(value: Any, argument: str = "axis") -> tuple[str, ...]:
    """Return several names as a tuple; a single name may be given as a string."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, (tuple, list)) or not all(isinstance(name, str) and name for name in several):
        raise ValueError(f"{argument} must be a name or several names, got {shown(value)}")
    return tuple(several)


def is_integer(x: Any) -> bool:
    """Whether x is an integer that is known while tracing, and no bool."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def integer(name: str, x: Any) -> None:
    """Raise ValueError unless x is an integer that fits JAX's integers: 64 bits if they are enabled, else 32."""
    bounds = jnp.iinfo(dtypes.canonicalize_dtype(np.int64))
    if not is_integer(x) or not bounds.min <= x <= bounds.max:
        beyond = f", which does not fit into {bounds.dtype}" if is_integer(x) else ""
        raise ValueError(f"{name} must be an integer, got {shown(x)}{beyond}")


def features(**towers: Any) -> None:
    """Raise ValueError unless all are matrices of one float dtype and one embedding size, with at least one row."""
    first, expected = next(iter(towers.items()))
    required(**towers)
    for name, x in towers.items():
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"{name} must have shape (rows, embedding size), neither of them 0; got {shape}")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {dtype}; pass the encoder's output, not ids")
        if shape[1] != expected.shape[1]:
            raise ValueError(
                f"{first} and {name} must have the same embedding size, got {expected.shape} and {shape}; project both "
                "to one size"
            )
        if dtype != expected.dtype:
            raise ValueError(
                f"{first} and {name} must have the same dtype, got {expected.dtype} and {dtype}; cast one of them"
            )


def required(**arrays: Any) -> None:
    """Raise ValueError for an argument that is None."""
    for name, x in arrays.items():
        if x is None:
            raise ValueError(f"{name} must be an array, got None")


def same_rows(**arrays: Any) -> None:
    """Raise ValueError unless all have one row for each row of the first; None is allowed."""
    present = {name: x for name, x in arrays.items() if x is not None}
    first, expected = next(iter(present.items()))
    for name, x in present.items():
        if jnp.ndim(x) == 0 or len(x) != len(expected):
            raise ValueError(
                f"{name} must have one row for each row of {first}, got shapes {jnp.shape(x)} and {expected.shape}"
            )


def integers(**arrays: Any) -> None:
    """Raise ValueError unless ids and labels are integers; None is allowed."""
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(
                f"{name} must be integers, got {jnp.result_type(x)}; number them, or cast them if they are"
            )


def vector(**arrays: Any) -> None:
    """Raise ValueError unless all have one number for each row; None is allowed."""
    for name, x in arrays.items():
        if x is not None and jnp.ndim(x) != 1:
            hint = "; for one-hot rows pass the argmax" if jnp.issubdtype(x.dtype, jnp.integer) else ""
            raise ValueError(f"{name} must have shape (rows,), got {jnp.shape(x)}{hint}")


def classes(labels: Any, num_classes: int | None, ignore_index: int | None) -> None:
    """Raise ValueError for labels that are known and name no class; without a number of classes any from 0 on does."""
    values = known(labels)
    if values is None:
        return
    values = values[values != ignore_index]
    if num_classes is None:
        check_label(int(values.min(initial=0)))
    elif (wrong := values[(values < 0) | (values >= num_classes)]).size:
        raise ValueError(f"labels must lie in [0, {num_classes}), or be ignore_index; got {wrong[0]}")


def labeled(labels: Array, ignore_index: int | None) -> Array:
    """Return which rows count: all but those of the label ignore_index, which some dtypes cannot hold."""
    bounds = jnp.iinfo(labels.dtype)
    if ignore_index is None or not bounds.min <= ignore_index <= bounds.max:
        return jnp.ones_like(labels, dtype=bool)
    return labels != ignore_index


def scalar(*, positive: bool = False, **numbers: Any) -> None:
    """Raise ValueError unless all are real scalars; known values must be finite and, if asked for, positive."""
    for name, x in numbers.items():
        if isinstance(x, int) and not isinstance(x, bool):
            integer(name, x)
        elif not isinstance(x, (float, *_ARRAYS)):
            raise ValueError(f"{name} must be a number or an array of shape (), got {shown(x)}")
        dtype = x.dtype if isinstance(x, _ARRAYS) else np.dtype(type(x))
        real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        if jnp.shape(x) not in ((), (1,)) or not real:
            raise ValueError(f"{name} must be a number or an array of shape (), got {dtype}{jnp.shape(x)}")
        value = known(x)
        if value is not None and not np.all(abs(value.astype(np.float64)) <= LARGEST):
            raise ValueError(f"{name} must be finite and within the range of float32, got {x}; clamp it")
        if positive and value is not None and not np.all(value > 0):
            raise ValueError(f"{name} must be positive, got {x}; logits are similarities divided by it")
        if positive and value is not None and not np.all(value >= SMALLEST_DIVISOR):
            raise ValueError(
                f"{name} must be at least {SMALLEST_DIVISOR}, got {x}; logits are similarities divided by it"
            )


def pairs(first: str, second: str, **towers: Any) -> dict[str, Any]:
    """Check two towers of paired rows, and the ids and weights of the pairs; return all as arrays."""
    rows = arrays(**towers)
    features(**{name: rows[name] for name in (first, second)})
    same_rows(**rows)
    vector(ids=rows["ids"], weights=rows["weights"])
    integers(ids=rows["ids"])
    return rows


def random_key(key: Any) -> None:
    """Raise ValueError unless key is one key of `jax.random`, or None."""
    if key is not None and not (
        isinstance(key, Array)
        and (key.shape == () if jnp.issubdtype(key.dtype, dtypes.prng_key) else key.shape == (2,))
    ):
        raise ValueError(f"key must be one key of jax.random.key(seed), got {shown(key)}")


def fraction(name: str, value: Any) -> None:
    """Raise ValueError unless value is a number within [0, 1] that is known while tracing."""
    number = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number within [0, 1] that is known while tracing, got {shown(value)}")


def as_scalar(x: Any, dtype: Any) -> Array:
    """Reshape a scalar to (), in the dtype of sums."""
    return jnp.reshape(jnp.asarray(x, dtype), ())
