"""The mesh axis that a batch is split over: who is there, and what travels along it.

JAX differentiates its collectives itself, each by its adjoint: psum of what varies is the broadcast of its cotangent,
all_gather's is psum_scatter, ppermute's the permutation back. So nothing here has a derivative of its own; but all of
it relies on `jax.shard_map` knowing what varies over which axis (`check_vma=True`, its default).
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
    """Axes of a mesh that share a batch, as one; with no names, a batch in one piece.

    Args:
        names: of axes of the `jax.shard_map` around.
    """

    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """W, the devices that share the batch."""
        return int(lax.axis_size(self.names)) if self.names else 1

    @property
    def index(self) -> Array:
        """The place of this device among them; its rows are the batch's index-th b."""
        return lax.axis_index(self.names) if self.names else jnp.zeros((), jnp.int32)

    def sum(self, x: Array) -> Array:
        """Over devices; the same on all of them."""
        return lax.psum(x, self.names) if self.names else x

    def max(self, x: Array) -> Array:
        """Over devices; the same on all of them."""
        return lax.pmax(x, self.names) if self.names else x

    def gather(self, tree: Tree) -> Tree:
        """All devices' rows, one below the other."""
        return _together(lambda x: lax.all_gather(x, self.names, tiled=True), tree) if self.names else tree

    def scatter_sum(self, tree: Tree) -> Tree:
        """Of (W b, ...) on each device the sum, and of that one's own b rows."""
        return _together(lambda x: lax.psum_scatter(x, self.names, tiled=True), tree) if self.names else tree

    def take_from(self, tree: Tree, ahead: int) -> Tree:
        """What the device has that is so many places ahead, in a ring."""
        sends = [((device + ahead) % self.size, device) for device in range(self.size)]
        return _together(lambda x: lax.ppermute(x, self.names, sends), tree)

    def rows(self, b: int) -> Array:
        """The places of this device's b rows in the whole batch."""
        return self.index * b + jnp.arange(b, dtype=jnp.int32)


def vary_alike(*trees: Any, axis: Axis = Axis()) -> Any:  # it is frozen
    """The same arrays, all of them varying over each axis that one of them varies over, and over `axis`.

    Made here, outside of our own derivatives, JAX sums the gradients of what did not vary by itself.
    """
    leaves = jax.tree.leaves(trees)
    names = frozenset(axis.names).union(*(varies_over(leaf) for leaf in leaves))
    return jax.tree.map(lambda x: vary(x, names), trees)


@jax.custom_jvp
def once(tree: Tree) -> Tree:
    """The same, which must not be differentiated: for what derivatives that are ours are made of."""
    return tree


@once.defjvp
def _refuse(_primals: Any, _tangents: Any) -> Any:
    raise NotImplementedError("the gradient of a loss of wholebatch.jax cannot be differentiated again")


def vary(x: Array, names: frozenset[str]) -> Array:
    """The same on every device along those axes, to the eyes of `jax.shard_map` no longer so."""
    missing = tuple(sorted(names - varies_over(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def varies_over(x: Any) -> frozenset[str]:
    """Axes along which devices may hold different values."""
    of = jax.typeof(x)
    kind = getattr(of, "manual_axis_type", None)  # JAX 0.10; before and after it is `vma`
    return frozenset(of.vma if kind is None else kind.varying)


def _together(collective: Callable[[Array], Array], tree: Tree) -> Tree:
    """One message for all vectors of the same dtype and length, one for each other array."""
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    for at, leaf in enumerate(leaves):
        alike.setdefault((leaf.dtype, leaf.shape) if leaf.ndim == 1 else at, []).append(at)
    for places in alike.values():
        if len(places) == 1:
            leaves[places[0]] = collective(leaves[places[0]])
            continue
        columns = collective(jnp.stack([leaves[at] for at in places], 1))
        for column, at in enumerate(places):
            leaves[at] = columns[:, column]
    return jax.tree.unflatten(structure, leaves)
