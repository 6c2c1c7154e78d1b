"""The logarithm of a sum of exponentials, as a pair (largest term, rescaled sum) to which terms can be added.

    log sum_j e^{s_j} = top + log total,    top = max_j s_j,    total = sum_j e^{s_j - top}

Two partial sums are added by rescaling both to the larger top. No exponent is ever above 0, and the largest is 0: at
any scale nothing overflows, and no term that matters underflows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .axis import Axis


class LogSum(NamedTuple):
    """A sum of exponentials for each row, (rows,) each; top is -inf where there is no term yet."""

    top: Array
    total: Array

    @classmethod
    def of(cls, terms: Array, axis: int) -> LogSum:
        """Sum the exponentials of `terms` along an axis; -inf stands for no term."""
        top = terms.max(axis)
        return cls(top, jnp.exp(terms - jnp.expand_dims(_finite(top), axis)).sum(axis))

    @classmethod
    def empty(cls, rows: int, dtype: Any) -> LogSum:
        """Return the sum of no terms."""
        return cls(jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype))

    def add(self, other: LogSum) -> LogSum:
        """Return the sum of both."""
        top = jnp.maximum(self.top, other.top)
        totals = [part.total * jnp.exp(part.top - _finite(top)) for part in (self, other)]
        return LogSum(top, totals[0] + totals[1])

    @property
    def value(self) -> Array:
        """log sum exp; -inf for no terms, and NaN where a term is not finite."""
        return _finite(self.top) + jnp.log(self.total)


def add(first: Any, other: Any) -> Any:
    """Add two trees of sums, leaf by leaf: LogSums by :meth:`LogSum.add`, arrays by +."""
    return jax.tree.map(lambda a, b: a.add(b) if isinstance(a, LogSum) else a + b, first, other, is_leaf=_is_log_sum)


def reduce_to_owner(axis: Axis, sums: Any) -> Any:
    """Reduce sums over each device's rows, (W b, ...) for all columns, to the owner of each column, (b, ...).

    Collectives: one pmax of W b numbers if there are exponentials, then one psum_scatter for each kind of array.
    """
    nodes = jax.tree.leaves(sums, is_leaf=_is_log_sum)
    largest = [_finite(axis.max(node.top)) for node in nodes if isinstance(node, LogSum)]
    common, tops = iter(largest), iter(largest)

    def at_common_top(leaf: Any) -> Any:
        if not isinstance(leaf, LogSum):
            return leaf
        return leaf.total * jnp.exp(leaf.top - next(common))

    def with_local_top(leaf: Any, sums: Array) -> Any:
        if not isinstance(leaf, LogSum):
            return sums
        b = len(sums)
        return LogSum(lax.dynamic_slice_in_dim(next(tops), axis.index * b, b), sums)

    reduced = axis.reduce_scatter(jax.tree.map(at_common_top, sums, is_leaf=_is_log_sum))
    return jax.tree.map(with_local_top, sums, reduced, is_leaf=_is_log_sum)


def _finite(top: Array) -> Array:
    return jnp.where(top == -jnp.inf, 0, top)


def _is_log_sum(node: Any) -> bool:
    return isinstance(node, LogSum)
