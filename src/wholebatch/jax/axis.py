"""The mesh axis that a batch is split over: its size, this device's index, and the collectives along it.

JAX differentiates its collectives itself, each by its adjoint: the adjoint of psum broadcasts the cotangent, that of
all_gather is psum_scatter, that of ppermute the inverse permutation. So nothing here defines a derivative. All of it
relies on `jax.shard_map` tracking which values vary over which axis (`check_vma=True`, its default).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Axis:
    """Mesh axes that share a batch, used as one axis; without names the batch is in one piece."""

    names: tuple[str, ...] = ()  # axes of the surrounding `jax.shard_map`

    @property
    def size(self) -> int:
        """W, the number of devices that share the batch."""
        return int(lax.axis_size(self.names)) if self.names else 1

    @property
    def index(self) -> Array:
        """The index of this device on the axis; it holds the index-th b rows of the batch."""
        return lax.axis_index(self.names) if self.names else jnp.zeros((), jnp.int32)

    def sum(self, x: Array) -> Array:
        """Sum over devices; the result is the same on all of them."""
        return lax.psum(x, self.names) if self.names else x

    def max(self, x: Array) -> Array:
        """Take the maximum over devices; the result is the same on all of them."""
        return lax.pmax(x, self.names) if self.names else x

    def gather(self, tree: Tree) -> Tree:
        """Concatenate the rows of all devices, device 0 first."""
        return _grouped(lambda x: lax.all_gather(x, self.names, tiled=True), tree) if self.names else tree

    def reduce_scatter(self, tree: Tree) -> Tree:
        """Sum arrays (W b, ...) over devices and return this device's b rows of the sum."""
        return _grouped(lambda x: lax.psum_scatter(x, self.names, tiled=True), tree) if self.names else tree

    def receive_from(self, tree: Tree, ahead: int) -> Tree:
        """Receive the tree of the device that is `ahead` places ahead in a ring."""
        sends = [((device + ahead) % self.size, device) for device in range(self.size)]
        return _grouped(lambda x: lax.ppermute(x, self.names, sends), tree)

    def rows(self, b: int) -> Array:
        """Return the global indices of this device's b rows."""
        return self.index * b + jnp.arange(b, dtype=jnp.int32)


def vary_alike(*trees: Any, axis: Axis = Axis()) -> Any:  # it is frozen
    """Make all arrays vary over `axis` and over each axis that one of them varies over.

    This happens outside of the library's own derivatives, so that JAX itself sums the gradients of arrays that did not
    vary.
    """
    leaves = jax.tree.leaves(trees)
    names = frozenset(axis.names).union(*(varies_over(leaf) for leaf in leaves))
    return jax.tree.map(lambda x: vary(x, names), trees)


@jax.custom_jvp
def once_differentiable(tree: Tree) -> Tree:
    """Return the tree unchanged; differentiating it raises. The library's own derivatives use it."""
    return tree


@once_differentiable.defjvp
def _refuse(_primals: Any, _tangents: Any) -> Any:
    raise NotImplementedError("the gradient of a loss of wholebatch.jax cannot be differentiated again")


def vary(x: Array, names: frozenset[str]) -> Array:
    """Mark x, which is the same on all devices along these axes, as varying over them for `jax.shard_map`."""
    missing = tuple(sorted(names - varies_over(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def varies_over(x: Any) -> frozenset[str]:
    """Return the axes along which devices may hold different values of x."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # JAX 0.10; before and after it is `vma`
    return frozenset(aval.vma if kind is None else kind.varying)


def _grouped(collective: Callable[[Array], Array], tree: Tree) -> Tree:
    """Apply a collective with one message for all vectors of equal dtype and length, and one for each other array."""
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, leaf.shape) if leaf.ndim == 1 else index, []).append(index)
    for places in groups.values():
        if len(places) == 1:
            leaves[places[0]] = collective(leaves[places[0]])
            continue
        columns = collective(jnp.stack([leaves[index] for index in places], 1))
        for column, index in enumerate(places):
            leaves[index] = columns[:, column]
    return jax.tree.unflatten(structure, leaves)
