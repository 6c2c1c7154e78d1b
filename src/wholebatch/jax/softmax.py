r"""The statistics of softmax losses: the logsumexp of each row and column of S, and the sums of the positives' logits.

    S_ij = scale m_i n_j x_i . y_j,    lse_i = log sum_{j in A} e^{S_ij},    positives_i = sum_{j in P} S_ij

A are the candidates, which are not excluded, and P the positives. m and n are the inverse norms of rows that are
normalized, or 1. With cotangents u of lse and p of positives, and v and q those of the columns,

    dS_ij = [A] (u_i e^{S_ij - lse_i} + v_j e^{S_ij - lse_j}) + [P] (p_i + q_j)
    G_ij  = m_i dS_ij n_j,    dX = scale G Y,    dY = scale G^T X
    dscale = sum_i x_i . (G Y)_i,    dm_i = scale x_i . (G Y)_i / m_i,    and n likewise

so that the gradients of scale and norms need no pass of their own. The forward pass computes lse from the tiles of S,
the backward pass computes the tiles again: positives are subtracted in a tile before G is rounded for bfloat16
products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .axis import once_differentiable, vary_alike
from .logsumexp import LogSum, add
from .pairs import Tower, entries, with_valid
from .products import matrix_times_rows, rows_times_rows, sum_dtype, transposed_times_rows
from .sweep import Sweep


class RowStatistics(NamedTuple):
    """The statistics of each row, or column, (b,) each; None where they are not computed."""

    lse: Any  # the logsumexp over the candidates, -inf without any; in a sweep the LogSum over the tiles so far
    positives: Array | None  # the sum of the positives' logits
    num_positives: Array | None  # None where each row that counts has one
    all_logits: Array | None  # the sum of the candidates' logits; None without label smoothing
    num: Array | None  # the number of candidates; None without label smoothing


@dataclass(frozen=True)
class SoftmaxPlan:
    """The statistics to compute."""

    sweep: Sweep  # rows and columns of a symmetric S are the same, and their sums are added
    rows: bool = True  # whether statistics of rows are computed
    cols: bool = True  # and of columns
    positives: bool = True  # whether S has positives
    count: bool = False  # whether these are counted; otherwise each row that counts has one
    smooth: bool = False  # whether the sums of all logits are computed

    def empty(self, rows: int, dtype: Any) -> tuple[RowStatistics | None, RowStatistics | None]:
        """Return the sums over no tiles, of rows and of columns."""

        def zeros(present: bool) -> Array | None:
            return jnp.zeros(rows, dtype) if present else None

        sums = RowStatistics(
            LogSum.empty(rows, dtype), zeros(self.positives), zeros(self.count), *[zeros(self.smooth) for _ in "12"]
        )
        return sums if self.rows else None, sums if self.cols else None


def softmax_statistics(
    plan: SoftmaxPlan, x: Tower, y: Tower | None, scale: Array
) -> tuple[RowStatistics | None, RowStatistics | None]:
    """Compute the statistics of this device's rows and of its columns; for a symmetric S (y is None) of rows only.

    x stays, y travels.
    """
    towers = [None if tower is None else with_valid(tower, plan.sweep.tile) for tower in (x, y)]
    x, y, scale = vary_alike(*towers, scale, axis=plan.sweep.axis)
    return _statistics(plan, x, y, scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    plan: SoftmaxPlan, x: Tower, y: Tower | None, scale: Array
) -> tuple[RowStatistics | None, RowStatistics | None]:
    return _swept(plan, x, y, scale, keep=False)[0]


def _swept(
    plan: SoftmaxPlan, x: Tower, y: Tower | None, scale: Array, *, keep: bool
) -> tuple[tuple[RowStatistics | None, RowStatistics | None], Array | None]:
    """Return the statistics, and the products that are kept for the backward pass."""
    dtype = sum_dtype(x.features)

    def visit(x: Tower, y: Tower, _: Array | None) -> tuple[RowStatistics | None, RowStatistics | None, Array]:
        products = rows_times_rows(x.features, y.features)
        logits = scale * _times_inverse_norms(products, x, y)
        candidates, positive = entries(x.codes, y.codes)
        candidates = None if candidates is None else jnp.broadcast_to(candidates, logits.shape)
        terms = logits if candidates is None else jnp.where(candidates, logits, -jnp.inf)

        def over(axis: int) -> RowStatistics:
            positives = num_positives = all_logits = num = None
            if positive is not None:
                positives = jnp.where(positive, logits, 0).sum(axis)
            if positive is not None and plan.count:
                num_positives = jnp.sum(positive, axis, dtype=dtype)
            if plan.smooth:
                all_logits = (logits if candidates is None else jnp.where(candidates, logits, 0)).sum(axis)
                num = jnp.sum(jnp.ones_like(logits, bool) if candidates is None else candidates, axis, dtype=dtype)
            return RowStatistics(LogSum.of(terms, axis), positives, num_positives, all_logits, num)

        return over(1) if plan.rows else None, over(0) if plan.cols else None, products

    x_sums, y_sums, kept = plan.sweep(
        visit, x, x if y is None else y, lambda rows: plan.empty(rows, dtype), keep=dtype if keep else None
    )
    if y is None:
        x_sums, y_sums = add(x_sums, y_sums), None
    rows, cols = (None if sums is None else sums._replace(lse=sums.lse.value) for sums in (x_sums, y_sums))
    return (rows, cols), kept


class _BackwardTower(NamedTuple):
    """A tower as the backward pass takes it: with its rows' logsumexp and the cotangents of their statistics."""

    tower: Tower
    lse: Array | None
    cotangents: RowStatistics | None


def _forward(plan: SoftmaxPlan, x: Tower, y: Tower | None, scale: Array) -> tuple[Any, Any]:
    sides, kept = _swept(plan, x, y, scale, keep=True)
    return sides, (x, y, scale, *[None if side is None else side.lse for side in sides], kept)


def _backward(plan: SoftmaxPlan, kept: Any, cotangents: Any) -> tuple[Tower, Tower | None, Array]:
    x, y, scale, rows_lse, cols_lse, products = kept
    x, scale = x._replace(features=once_differentiable(x.features)), once_differentiable(scale)
    y = None if y is None else y._replace(features=once_differentiable(y.features))

    def visit(x: _BackwardTower, y: _BackwardTower, products: Array | None) -> tuple[Array, Array, None]:
        if products is None:
            products = rows_times_rows(x.tower.features, y.tower.features)
        logits = scale * _times_inverse_norms(products, x.tower, y.tower)
        candidates, positive = entries(x.tower.codes, y.tower.codes)
        weights, positive_weights = jnp.zeros_like(logits), jnp.zeros_like(logits)
        for side, axis in ((x, 1), (y, 0)):
            if side.lse is None or side.cotangents is None:
                continue
            lse, grads = (
                jax.tree.map(lambda a, axis=axis: jnp.expand_dims(a, axis), tree)
                for tree in (side.lse, side.cotangents)
            )
            weights += grads.lse * jnp.exp(logits - lse)
            if plan.smooth:
                weights += grads.all_logits
            if positive is not None:
                positive_weights += grads.positives
        if candidates is not None:
            weights = jnp.where(candidates, weights, 0)
        if positive is not None:
            weights += jnp.where(positive, positive_weights, 0)
        weights = _times_inverse_norms(weights, x.tower, y.tower)
        return matrix_times_rows(weights, y.tower.features), transposed_times_rows(weights, x.tower.features), None

    def empty(rows: int) -> tuple[Array, Array]:
        return (jnp.zeros((rows, x.features.shape[1]), sum_dtype(x.features)),) * 2

    row_cotangents, col_cotangents = cotangents
    left = _BackwardTower(x, rows_lse, row_cotangents)
    right = left if y is None else _BackwardTower(y, cols_lse, col_cotangents)
    x_grad, y_grad, _ = plan.sweep(visit, left, right, empty, kept=products)
    if y is None:
        gradient, scale_grad = _tower_gradient(x, x_grad + y_grad, scale)
        return gradient, None, scale_grad / 2  # each entry is in two rows' sums
    gradient, scale_grad = _tower_gradient(x, x_grad, scale)
    return gradient, _tower_gradient(y, y_grad, scale)[0], scale_grad


_statistics.defvjp(_forward, _backward)


def _tower_gradient(tower: Tower, g: Array, scale: Array) -> tuple[Tower, Array]:
    """Return a tower's gradient and that of the scale, given the tower's rows of G Y."""
    products = (tower.features.astype(g.dtype) * g).sum(1)
    norm_grads = None
    if tower.inverse_norms is not None:
        norm_grads = (scale * products / tower.inverse_norms).astype(tower.inverse_norms.dtype)
    return Tower((scale * g).astype(tower.features.dtype), norm_grads, None), products.sum()  # type: ignore[arg-type]


def _times_inverse_norms(entries: Array, x: Tower, y: Tower) -> Array:
    if x.inverse_norms is not None:
        entries = entries * x.inverse_norms[:, None]
    return entries if y.inverse_norms is None else entries * y.inverse_norms
