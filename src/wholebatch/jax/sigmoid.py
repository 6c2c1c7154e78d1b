r"""The sums of the sigmoid loss: binary cross-entropies of all entries of S, each on its own.

    S_ij = scale x_i . y_j + bias,    l_i = sum_j softplus(-z_ij S_ij),    z_ij = 1 in P, else -1
    dS_ij = -u_i z_ij sigmoid(-z_ij S_ij),    u: the cotangents of l

No entry needs another's value. Where u is known in advance, as for a weighted sum, one pass computes the loss and its
gradient: 3 units of work instead of 4, all in the forward pass. The backward pass only multiplies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .axis import once_differentiable, vary_alike
from .pairs import Tower, entries, with_valid
from .products import matrix_times_rows, rows_times_rows, sum_dtype, transposed_times_rows
from .sweep import Sweep

_Gradient = tuple[Array, Array, Array, Array]  # of u . l, with respect to both features, the scale and the bias


def row_losses(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array) -> Array:
    """Return l_i of this device's rows, (b,); the backward pass sweeps again."""
    return _row_losses(sweep, *_prepared(sweep, x, y, scale, bias))


def weighted_sum(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array, u: Array) -> Array:
    """Return sum_i u_i l_i over this device's rows."""
    return _weighted_sum(sweep, *_prepared(sweep, x, y, scale, bias, u))


def _prepared(sweep: Sweep, x: Tower, y: Tower, *others: Array) -> Any:
    towers = (with_valid(tower, sweep.tile) for tower in (x, y))
    return vary_alike(*towers, *others, axis=sweep.axis)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_losses(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array) -> Array:
    dtype = sum_dtype(x.features)

    def visit(x: Tower, y: Tower, _: Array | None) -> tuple[Array, None, None]:
        losses, _ = _entry_losses(x, y, scale, bias)
        return losses.sum(1), None, None

    return sweep(visit, x, y, lambda rows: (jnp.zeros(rows, dtype), None))[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array, u: Array) -> Array:
    return (u * _row_losses(sweep, x, y, scale, bias)).sum()


def _gradient(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array, u: Array) -> tuple[Array, _Gradient]:
    """Return l, and the gradient of u . l."""
    dtype, embedding_size = sum_dtype(x.features), x.features.shape[1]

    def visit(x: tuple[Tower, Array], y: Tower, _: Array | None) -> tuple[Any, Array, None]:
        tower, u = x
        losses, logit_grads = _entry_losses(tower, y, scale, bias)
        logit_grads = u[:, None] * logit_grads
        sums = losses.sum(1), logit_grads.sum(1), matrix_times_rows(logit_grads, y.features)
        return sums, transposed_times_rows(logit_grads, tower.features), None

    def empty(rows: int) -> tuple[Any, Array]:
        features = jnp.zeros((rows, embedding_size), dtype)
        return (jnp.zeros(rows, dtype), jnp.zeros(rows, dtype), features), features

    (losses, bias_grads, x_grad), y_grad, _ = sweep(visit, (x, u), y, empty)
    scale_grad = (x.features.astype(dtype) * x_grad).sum()
    return losses, (scale * x_grad, scale * y_grad, scale_grad, bias_grads.sum())


def _forward_sum(sweep: Sweep, x: Tower, y: Tower, scale: Array, bias: Array, u: Array) -> tuple[Array, Any]:
    losses, gradient = _gradient(sweep, x, y, scale, bias, u)
    return (u * losses).sum(), (losses, gradient, x.features[:0])


def _backward_sum(sweep: Sweep, kept: tuple[Array, _Gradient, Array], cotangent: Array) -> tuple[Any, ...]:
    # The gradient of a sum over the batch may overflow float16 where that of the mean does not: it is rounded here.
    losses, gradient, like = once_differentiable(kept)
    return *_as_towers(jax.tree.map(lambda g: cotangent * g, gradient), like.dtype), cotangent * losses


def _forward_rows(sweep: Sweep, *arguments: Any) -> tuple[Array, Any]:
    return _row_losses(sweep, *arguments), arguments


def _backward_rows(sweep: Sweep, arguments: Any, cotangents: Array) -> tuple[Any, ...]:
    x, y, scale, bias = arguments
    x, y = (tower._replace(features=once_differentiable(tower.features)) for tower in (x, y))
    return _as_towers(_gradient(sweep, x, y, scale, bias, cotangents)[1], x.features.dtype)


_weighted_sum.defvjp(_forward_sum, _backward_sum)
_row_losses.defvjp(_forward_rows, _backward_rows)


def _as_towers(gradient: _Gradient, dtype: Any) -> tuple[Any, ...]:
    return *(Tower(g.astype(dtype), None, None) for g in gradient[:2]), *gradient[2:]  # type: ignore[arg-type]


def _entry_losses(x: Tower, y: Tower, scale: Array, bias: Array) -> tuple[Array, Array]:
    """Return each entry's loss and its derivative with respect to the logit; 0 for excluded entries."""
    logits = scale * rows_times_rows(x.features, y.features) + bias
    candidates, positive = entries(x.codes, y.codes)
    assert positive is not None
    signed = jnp.where(positive, logits, -logits)
    losses, logit_grads = jax.nn.softplus(-signed), jnp.where(positive, -1, 1) * jax.nn.sigmoid(-signed)
    if candidates is None:
        return losses, logit_grads
    return jnp.where(candidates, losses, 0), jnp.where(candidates, logit_grads, 0)
