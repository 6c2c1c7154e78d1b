r"""What the sigmoid loss is made of: binary cross-entropies of all entries of S, each for itself.

    S_ij = scale x_i . y_j + bias,    l_i = sum_j softplus(-z_ij S_ij),    z_ij = 1 in P, else -1
    dS_ij = -u_i z_ij sigmoid(-z_ij S_ij),    u: the cotangents of l

No entry needs another's number. Where u is known beforehand, as it is for a weighted sum, one pass makes the loss and
its gradient: 3 units of work in the place of 4, all in the forward pass; the backward pass multiplies.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .axis import once, vary_alike
from .exchange import Sweep
from .products import matrix_times_rows, rows_times_rows, sum_dtype, transposed_times_rows
from .softmax import Tower, entries, with_valid


class _Gradient(NamedTuple):
    """Of u . l by the features, the scale and the bias."""

    x: Array
    y: Array
    scale: Array
    bias: Array


def row_losses(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array) -> Array:
    """l_i of this device's rows, (b,); the backward pass sweeps again."""
    return _row_losses(sweep, *_ready(sweep, x, y, scale, bias))


def weighted_sum(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array, u: Array) -> Array:
    """sum_i u_i l_i over this device's rows."""
    return _weighted_sum(sweep, *_ready(sweep, x, y, scale, bias, u))


def _ready(sweep: Sweep, x: Tower, y: Tower, *others: Array) -> Any:
    towers = (with_valid(tower, sweep.tile) for tower in (x, y))
    return vary_alike(*towers, *others, axis=sweep.axis)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_losses(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array) -> Array:
    dtype = sum_dtype(x.features)

    def visit(x: Tower, y: Tower, _: Array | None) -> tuple[Array, None, None]:
        losses, _ = _of_tile(x, y, scale, bias)
        return losses.sum(1), None, None

    return sweep(visit, x, y, lambda rows: (jnp.zeros(rows, dtype), None))[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array, u: Array) -> Array:
    return (u * _row_losses(sweep, x, y, scale, bias)).sum()


def _gradient(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array, u: Array) -> tuple[Array, _Gradient]:
    """l, and the gradient of u . l."""
    dtype, width = sum_dtype(x.features), x.features.shape[1]

    def visit(x: tuple[Tower, Array], y: Tower, _: Array | None) -> tuple[Any, Array, None]:
        tower, u = x
        losses, of_logits = _of_tile(tower, y, scale, bias)
        of_logits = u[:, None] * of_logits
        sums = losses.sum(1), of_logits.sum(1), matrix_times_rows(of_logits, y.features)
        return sums, transposed_times_rows(of_logits, tower.features), None

    def nothing(rows: int) -> tuple[Any, Array]:
        features = jnp.zeros((rows, width), dtype)
        return (jnp.zeros(rows, dtype), jnp.zeros(rows, dtype), features), features

    (losses, of_bias, of_x), of_y, _ = sweep(visit, (x, u), y, nothing)
    of_scale = (x.features.astype(dtype) * of_x).sum()
    return losses, _Gradient(scale * of_x, scale * of_y, of_scale, of_bias.sum())


def _forward_sum(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array, u: Array) -> tuple[Array, Any]:
    losses, gradient = _gradient(sweep, x, y, scale, bias, u)
    return (u * losses).sum(), (losses, gradient, x.features[:0])


def _backward_sum(sweep: Sweep, kept: tuple[Array, _Gradient, Array], cotangent: Array) -> tuple[Any, ...]:
    # That of a sum over the batch may be beyond float16, where that of the mean is not: it is rounded here.
    losses, gradient, like = once(kept)
    return *_as_towers(jax.tree.map(lambda g: cotangent * g, gradient), like.dtype), cotangent * losses


def _forward_rows(sweep: Sweep, *arguments: Any) -> tuple[Array, Any]:
    return _row_losses(sweep, *arguments), arguments


def _backward_rows(sweep: Sweep, arguments: Any, cotangents: Array) -> tuple[Any, ...]:
    x, y, scale, bias = arguments
    x, y = (tower._replace(features=once(tower.features)) for tower in (x, y))
    return _as_towers(_gradient(sweep, x, y, scale, bias, cotangents)[1], x.features.dtype)


_weighted_sum.defvjp(_forward_sum, _backward_sum)
_row_losses.defvjp(_forward_rows, _backward_rows)


def _as_towers(of: _Gradient, dtype: Any) -> tuple[Any, ...]:
    return *(Tower(g.astype(dtype), None, None) for g in of[:2]), of.scale, of.bias  # type: ignore[arg-type]


def _of_tile(x: Tower, y: Tower, scale: Array, bias: Array) -> tuple[Array, Array]:
    """Of each entry the loss, and its derivative by the logit; 0 for what is left out."""
    logits = scale * rows_times_rows(x.features, y.features) + bias
    counted, positive = entries(x.codes, y.codes)
    assert positive is not None
    signed = jnp.where(positive, logits, -logits)
    losses, of_logits = jax.nn.softplus(-signed), jnp.where(positive, -1, 1) * jax.nn.sigmoid(-signed)
    if counted is None:
        return losses, of_logits
    return jnp.where(counted, losses, 0), jnp.where(counted, of_logits, 0)
