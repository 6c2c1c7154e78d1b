"""From global arrays on a mesh to the rows of one device, and back: every loss is written once, for one device.

    clip_loss(x, y, ..., mesh=mesh)    --shard_map-->    clip_loss_local(x_local, y_local, ..., axis_name="data")

Batches that do not divide over the devices are padded at the end with rows of zeros, which the losses exclude from
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from . import checks
from .axis import Axis, varies_over
from .tiles import pad_rows

AxisNames = str | Sequence[str]


def on_mesh(
    body: Callable[[Axis, dict[str, Any], Any], Array],
    rows: dict[str, Array | None],
    replicated: Any,
    *,
    mesh: Mesh | AbstractMesh | None,
    axis: AxisNames,
    per_row: bool,
) -> Array:
    """Run `body` on every device of an axis.

    Args:
        body: takes the axis, this device's rows, and the replicated arrays; hashable, because tracing caches it.
        rows: arrays that are split along their first dimension; None stays None.
        replicated: a tree of arrays that are the same on all devices.
        mesh: None takes the mesh of `jax.set_mesh`; without one, the batch is in one piece.
        axis: a name, or several names that are used as one axis.
        per_row: whether `body` returns a row for each row of the first of `rows`; otherwise the result is replicated.
    """
    names = checks.names(axis)
    if not names:
        raise ValueError("axis must be a name or several names, got none")
    if mesh is None and (mesh := jax.sharding.get_abstract_mesh()).empty:
        check_not_split(rows)
        return _run_whole(rows, replicated, body=body)
    check_axes(mesh, names)
    current = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in current.axis_types and current.shape == mesh.shape:  # a jax.shard_map over other axes of it
        mesh = current
    first = next(iter(rows)) if per_row else None  # here, because `jit` sorts the names
    return _run_on_devices(rows, replicated, body=body, mesh=mesh, names=names, per_row=first)


# Jitted, so that calls outside of the caller's `jit` compile only once.


@partial(jax.jit, static_argnames=("body",))
def _run_whole(rows: dict[str, Array | None], replicated: Any, *, body: Callable[..., Array]) -> Array:
    return body(Axis(), rows, replicated)


@partial(jax.jit, static_argnames=("body", "mesh", "names", "per_row"))
def _run_on_devices(
    rows: dict[str, Array | None],
    replicated: Any,
    *,
    body: Callable[..., Array],
    mesh: Mesh | AbstractMesh,
    names: tuple[str, ...],
    per_row: str | None,
) -> Array:
    devices = prod(mesh.shape[name] for name in names)
    arrays = {name: x for name, x in rows.items() if x is not None}
    totals = {name: len(x) for name, x in arrays.items()}
    spec = PartitionSpec(names)
    split = {name: reshard_explicit(pad_rows(x, devices), mesh, spec) for name, x in arrays.items()}

    def on_device(split: dict[str, Array], replicated: Any) -> Array:
        return body(Axis(names), {**rows, **split, "totals": totals}, replicated)

    result = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=PartitionSpec() if per_row is None else spec,
    )(split, replicated)
    return result if per_row is None else first_rows(result, totals[per_row], mesh)


def in_shard_map(axis_name: AxisNames, rows: dict[str, Array | None]) -> Axis:
    """Return the axis of the surrounding `jax.shard_map`, after checking that JAX knows the rows to vary along it.

    Raises:
        ValueError: no such axis, or JAX takes the rows to be the same along it.
    """
    names = checks.names(axis_name, "axis_name")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"axis_name must name an axis, or several different ones, got {axis_name!r}")
    try:
        size = lax.axis_size(names)
    except NameError as error:
        raise ValueError(
            f"axis_name must name an axis of the jax.shard_map around this call, got {axis_name!r} ({error}). For "
            "global arrays, call the function without `_local`, with mesh= and axis="
        ) from error
    for name, x in rows.items():
        missing = set() if x is None else set(names) - varies_over(x)
        if missing:
            raise ValueError(
                f"{name} must vary over axis_name={axis_name!r}, as rows that in_specs splits do; JAX takes it to be "
                f"the same on all {size} devices along {', '.join(sorted(missing))}. With check_vma=False, and in "
                "pmap, JAX does not track this, and gradients come out divided by the number of devices: use "
                "jax.shard_map, and leave check_vma at True"
            )
    return Axis(names)


def replicated(x: Array) -> Array:
    """Replicate an array that is split over explicit axes, so that it can be sliced anywhere."""
    if not explicit_axes(x):
        return x
    typed: Any = jax.typeof(x) if isinstance(x, jax.core.Tracer) else x
    return jax.sharding.reshard(x, NamedSharding(typed.sharding.mesh, PartitionSpec()))


def explicit_axes(x: Any) -> set[str]:
    """Return the explicit axes over which an array is split."""
    return {name for entry in getattr(jax.typeof(x).sharding, "spec", ()) for name in checks.names(entry or ())}


def check_not_split(tree: Any) -> None:
    """Raise ValueError for arrays that are split over explicit axes: without the mesh JAX cannot multiply them."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if over := explicit_axes(x):
            raise ValueError(
                f"{jax.tree_util.keystr(path, simple=True) or 'the batch'} is split over "
                f"{', '.join(map(repr, sorted(over)))}, and no mesh is given: pass mesh=, or call jax.set_mesh(mesh)"
            )


def valid_rows(axis: Axis, name: str, rows: dict[str, Any]) -> Array | None:
    """Return a mask of this device's rows of an argument that belong to the batch and are no padding; None for all."""
    b, total = len(rows[name]), rows.get("totals", {}).get(name)
    return None if total is None or total == b * axis.size else axis.rows(b) < total


def reshard_explicit(x: Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Array:
    """Reshard x over the explicit axes of `spec`; `jax.shard_map` reshards over all other axes by itself."""
    explicit = {name for name, kind in zip(mesh.shape, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return x
    spec = PartitionSpec(*[tuple(name for name in checks.names(entry or ()) if name in explicit) for entry in spec])
    return jax.sharding.reshard(x, NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec)


def first_rows(x: Array, rows: int, mesh: Mesh | AbstractMesh | None) -> Array:
    """Return the first rows of x; replicated if they do not divide over the devices."""
    if rows == len(x):
        return x
    return (x if mesh is None else reshard_explicit(x, mesh, PartitionSpec()))[:rows]


def check_axes(mesh: Mesh | AbstractMesh, names: tuple[str, ...]) -> None:
    """Raise ValueError unless the names are axes of the mesh, and no surrounding `jax.shard_map` uses them."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    current = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(current.shape, current.axis_types, strict=True))
    if any(kinds.get(name) == AxisType.Manual for name in names):
        raise ValueError(
            f"inside of a jax.shard_map over {', '.join(map(repr, names))} each device has its local rows: call the "
            "function that ends with `_local`, with axis_name= (and `chunked` without mesh=)"
        )
    if not names or len(set(names)) < len(names) or any(name not in mesh.shape for name in names):
        raise ValueError(
            f"axis must name axes of the mesh, got {', '.join(map(repr, names))}; the mesh has "
            f"{', '.join(map(repr, mesh.shape)) or 'none'}"
        )
