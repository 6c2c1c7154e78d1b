r"""What softmax losses are made of: of each row, and of each column, of S the logsumexp and the positives' logits.

    S_ij = scale m_i n_j x_i . y_j,    lse_i = log sum_{j in A} e^{S_ij},    positives_i = sum_{j in P} S_ij

m and n are the inverse norms of rows that are normalized, or absent. With cotangents u of lse and p of positives, and v
and q those of the columns,

    dS_ij = [A] (u_i e^{S_ij - lse_i} + v_j e^{S_ij - lse_j}) + [P] (p_i + q_j)
    G_ij  = m_i dS_ij n_j,    dX = scale G Y,    dY = scale G^T X
    dscale = sum_i x_i . (G Y)_i,    dm_i = scale x_i . (G Y)_i / m_i,    and n likewise

so that what is learned beyond the features costs no pass of its own. The forward pass makes lse of the tiles of S, the
backward pass computes them once more: positives are subtracted in a tile before G is rounded for bfloat16 products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .axis import once, vary_alike
from .exchange import Sweep
from .logsumexp import LogSum, add
from .products import matrix_times_rows, rows_times_rows, sum_dtype, transposed_times_rows
from .tiles import side_of_tiles


class Codes(NamedTuple):
    """Of each row of a tower: what makes an entry positive, or leaves it out. None: no entry for that reason.

    Args:
        valid: (b,), whether the row is one of the batch, and no padding.
        itself: entries with equal codes are left out: a row beside itself.
        pair: entries with equal codes, but for those, are positives.
        same: entries with equal codes that are not positives are left out.
    """

    valid: Array | None = None
    itself: Array | None = None
    pair: Array | None = None
    same: Array | None = None

    @classmethod
    def of_pairs(cls, example: Array, ids: Array | None, valid: Array | None, *, together: bool) -> Codes:
        """Of paired rows; equal ids are positives (`together`), or left out."""
        if ids is None:
            return cls(valid, pair=example)
        return cls(valid, pair=ids) if together else cls(valid, pair=example, same=ids)


class Tower(NamedTuple):
    """Features of b rows, their inverse norms if they are normalized, and their codes."""

    features: Array
    factor: Array | None
    codes: Codes


class Sums(NamedTuple):
    """Of each row, or column, over the tiles so far."""

    exponentials: LogSum
    positives: Array | None
    num_positives: Array | None
    all_logits: Array | None
    num: Array | None


class Statistics(NamedTuple):
    """Of each row, or column, (b,) each.

    Args:
        lse: the logsumexp over all that are not left out, -inf if there is none.
        positives: the sum of the positives' logits.
        num_positives: how many there are.
        all_logits: the sum over all that are not left out; None where nothing is smoothed.
        num: how many these are.
    """

    lse: Array
    positives: Array | None
    num_positives: Array | None
    all_logits: Array | None
    num: Array | None


@dataclass(frozen=True)
class Plan:
    """Which numbers are wanted.

    Args:
        sweep: that makes them. Of a symmetric one rows and columns are the same, and are added.
        rows, cols: of which.
        positives: whether there are any.
        smooth: whether the sums of all logits are needed.
    """

    sweep: Sweep
    rows: bool = True
    cols: bool = True
    positives: bool = True
    smooth: bool = False

    def nothing(self, rows: int, dtype: Any) -> tuple[Sums | None, Sums | None]:
        """The sums over no tiles, of rows and of columns."""

        def empty(wanted: bool) -> Array | None:
            return jnp.zeros(rows, dtype) if wanted else None

        of_one = Sums(
            LogSum.nothing(rows, dtype), *[empty(self.positives) for _ in "12"], *[empty(self.smooth) for _ in "12"]
        )
        return of_one if self.rows else None, of_one if self.cols else None


def softmax_statistics(
    plan: Plan, x: Tower, y: Tower | None, scale: Array
) -> tuple[Statistics | None, Statistics | None]:
    """Of this device's rows and of its columns; of a symmetric S (y is None) of its rows alone.

    Args:
        plan: which.
        x: stays.
        y: travels.
        scale: a scalar.
    """
    towers = [None if of is None else with_valid(of, plan.sweep.tile) for of in (x, y)]
    x, y, scale = vary_alike(*towers, scale, axis=plan.sweep.axis)
    return _statistics(plan, x, y, scale)


def with_valid(tower: Tower, tile: int) -> Tower:
    """The same; where rows of zeros will fill the last tile, these can be told from others."""
    b, codes = len(tower.features), tower.codes
    if codes.valid is not None or b % side_of_tiles(b, tile) == 0:
        return tower
    return tower._replace(codes=codes._replace(valid=jnp.ones(b, bool)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(plan: Plan, x: Tower, y: Tower | None, scale: Array) -> tuple[Statistics | None, Statistics | None]:
    return _swept(plan, x, y, scale, keep=False)[0]


def _swept(
    plan: Plan, x: Tower, y: Tower | None, scale: Array, *, keep: bool
) -> tuple[tuple[Statistics | None, Statistics | None], Array | None]:
    """The statistics, and the products that are kept for the backward pass."""
    dtype = sum_dtype(x.features)

    def visit(x: Tower, y: Tower, _: Array | None) -> tuple[Sums | None, Sums | None, Array]:
        products = rows_times_rows(x.features, y.features)
        logits = scale * _times_factors(products, x, y)
        counted, positive = entries(x.codes, y.codes)
        counted = None if counted is None else jnp.broadcast_to(counted, logits.shape)
        terms = logits if counted is None else jnp.where(counted, logits, -jnp.inf)

        def over(axis: int) -> Sums:
            positives = num_positives = all_logits = num = None
            if positive is not None:
                positives = jnp.where(positive, logits, 0).sum(axis)
                num_positives = jnp.sum(positive, axis, dtype=dtype)
            if plan.smooth:
                all_logits = (logits if counted is None else jnp.where(counted, logits, 0)).sum(axis)
                num = jnp.sum(jnp.ones_like(logits, bool) if counted is None else counted, axis, dtype=dtype)
            return Sums(LogSum.of(terms, axis), positives, num_positives, all_logits, num)

        return over(1) if plan.rows else None, over(0) if plan.cols else None, products

    of_x, of_y, kept = plan.sweep(
        visit, x, x if y is None else y, lambda rows: plan.nothing(rows, dtype), keep=dtype if keep else None
    )
    if y is None:
        of_x, of_y = add(of_x, of_y), None
    return (_finished(of_x), _finished(of_y)), kept


def _finished(sums: Sums | None) -> Statistics | None:
    return None if sums is None else Statistics(sums.exponentials.value, *sums[1:])


class _Weighed(NamedTuple):
    """Rows as the backward pass takes them: with their logsumexp, and the cotangents of their statistics."""

    tower: Tower
    lse: Array | None
    of: Statistics | None


def _forward(plan: Plan, x: Tower, y: Tower | None, scale: Array) -> tuple[Any, Any]:
    found, kept = _swept(plan, x, y, scale, keep=True)
    return found, (x, y, scale, *[None if of is None else of.lse for of in found], kept)


def _backward(plan: Plan, kept: Any, cotangents: Any) -> tuple[Tower, Tower | None, Array]:
    x, y, scale, rows_lse, cols_lse, products = kept
    x, scale = x._replace(features=once(x.features)), once(scale)
    y = None if y is None else y._replace(features=once(y.features))
    of_rows, of_cols = cotangents

    def visit(x: _Weighed, y: _Weighed, products: Array | None) -> tuple[Array, Array, None]:
        if products is None:
            products = rows_times_rows(x.tower.features, y.tower.features)
        logits = scale * _times_factors(products, x.tower, y.tower)
        counted, positive = entries(x.tower.codes, y.tower.codes)
        weights, of_positives = jnp.zeros_like(logits), jnp.zeros_like(logits)
        for side, axis in ((x, 1), (y, 0)):
            if side.lse is None or side.of is None:
                continue
            lse, of = (jax.tree.map(lambda a, axis=axis: jnp.expand_dims(a, axis), of) for of in (side.lse, side.of))
            weights += of.lse * jnp.exp(logits - lse)
            if plan.smooth:
                weights += of.all_logits
            if positive is not None:
                of_positives += of.positives
        if counted is not None:
            weights = jnp.where(counted, weights, 0)
        if positive is not None:
            weights += jnp.where(positive, of_positives, 0)
        weights = _times_factors(weights, x.tower, y.tower)
        return matrix_times_rows(weights, y.tower.features), transposed_times_rows(weights, x.tower.features), None

    dtype, width = sum_dtype(x.features), x.features.shape[1]
    left = _Weighed(x, rows_lse, of_rows)
    right = left if y is None else _Weighed(y, cols_lse, of_cols)
    of_x, of_y, _ = plan.sweep(visit, left, right, lambda rows: (jnp.zeros((rows, width), dtype),) * 2, kept=products)
    if y is None:
        gradient, of_scale = _of_tower(x, of_x + of_y, scale)
        return gradient, None, of_scale / 2  # each entry is in two rows' sums
    gradient, of_scale = _of_tower(x, of_x, scale)
    return gradient, _of_tower(y, of_y, scale)[0], of_scale


_statistics.defvjp(_forward, _backward)


def _of_tower(tower: Tower, g: Array, scale: Array) -> tuple[Tower, Array]:
    """Of its rows of G Y its gradient, and that of the scale."""
    products = (tower.features.astype(g.dtype) * g).sum(1)
    of_factor = None if tower.factor is None else (scale * products / tower.factor).astype(tower.factor.dtype)
    return Tower((scale * g).astype(tower.features.dtype), of_factor, None), products.sum()  # type: ignore[arg-type]


def _times_factors(entries: Array, x: Tower, y: Tower) -> Array:
    if x.factor is not None:
        entries = entries * x.factor[:, None]
    return entries if y.factor is None else entries * y.factor


def entries(x: Codes, y: Codes) -> tuple[Array | None, Array | None]:
    """Of a tile which entries are not left out, and which are positives; None: all, and none."""

    def meet(name: str) -> Array | None:
        one, other = getattr(x, name), getattr(y, name)
        return None if one is None or other is None else one[:, None] == other

    itself, pair, same = meet("itself"), meet("pair"), meet("same")
    valid = None
    for of, axis in ((x.valid, 1), (y.valid, 0)):
        valid = _and(valid, None if of is None else jnp.expand_dims(of, axis))
    distinct = None if itself is None else ~itself
    positive = None if pair is None else _and(_and(pair, distinct), valid)
    if same is not None:
        same = same if pair is None else same & ~pair
    return _and(_and(distinct, None if same is None else ~same), valid), positive


def _and(one: Array | None, other: Array | None) -> Array | None:
    """Of two masks, as far as they are given."""
    if one is None or other is None:
        return other if one is None else one
    return one & other
