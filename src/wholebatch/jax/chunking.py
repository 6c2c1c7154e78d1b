r"""Gradient caching: activations exist for one chunk of the batch at a time, and the gradient is that of all of it.

In JAX this is rematerialization inside of a scan: `lax.scan` over chunks keeps each chunk's representations, and
`jax.checkpoint` its inputs, from which the backward pass computes the rest again.

A batch that is split over devices must not be cut into chunks by a plain reshape: (B, ...) -> (n, B / n, ...) makes one
chunk of whole devices' rows, and then the chunks, not the rows in them, are split; XLA gathers them again, and devices
encode each other's rows. Each device has to cut its local (b, ...) into (n, c, ...).

The devices should not sum their gradients in each chunk either, which XLA does for a scan over split arrays: n sums of
all parameters instead of one. So the scan runs on each device separately, with parameters that are marked as varying
over the devices once, before the scan; the derivative of this mark is one sum after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jax.typing import DTypeLike

from . import checks
from .axis import varies_over, vary
from .mesh import AxisNames, check_axes, check_not_split, explicit_axes, first_rows, reshard_explicit

_Tree = TypeVar("_Tree")


def chunked(
    encode_fn: Callable[..., _Tree],
    *,
    chunk_size: int | None = None,
    num_chunks: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis: AxisNames = "data",
    per_device: bool = True,
    grad_dtype: DTypeLike | None = None,
    policy: Callable[..., bool] | None = None,
) -> Callable[..., _Tree]:
    r"""Return an encoder for batches whose activations would not fit into memory: same values, same gradients.

    encode(params, batch) = concatenate(encode_fn(params, chunk) for chunk in batch)

    Args:
        encode_fn: takes parameters and a batch, a tree of arrays with a row for each example, and returns a tree of
            representations with as many rows. Rows must not depend on one another (no batch statistics).
        chunk_size: examples of a chunk, on each device.
        num_chunks: instead of chunk_size, the number of chunks at most. The last is filled with copies of the last
            rows, which are cut off again.
        mesh: the devices over which the batch is split. None takes the mesh of `jax.set_mesh`, if there is one. Inside
            of a `jax.shard_map` a device has its local rows, and mesh is None.
        axis: the axis of the mesh over which the batch's rows are split.
        per_device: True: encode_fn gets the rows of one device, inside of a `jax.shard_map` over `axis`, with whole
            parameters, whose gradients are summed over the devices once. False: it gets the rows of all devices, W
            times as many, as one array that is split: for parameters that are themselves split over this axis (FSDP);
            XLA then sums gradients, and gathers parameters, with each chunk.
        grad_dtype: the dtype in which the parameters' gradients are summed over chunks and devices, such as float32 for
            parameters in bfloat16; None takes the parameters' own. It takes a copy of the parameters in that dtype.
        policy: the values of a chunk that `jax.checkpoint` keeps; None keeps none.

    Returns:
        encode(params, batch, key=None). With a `key` of `jax.random` each chunk of each device gets a key of its own,
        as encode_fn(params, chunk, key), and the same key when it is encoded again.

    Work: the encoder runs forward twice. Collectives: one all-reduce of the parameters' gradient, as without chunks,
    and more where rows do not divide over the devices. Call it under `jit`: outside it compiles each time.

    Raises:
        ValueError: while tracing: not exactly one of chunk_size and num_chunks, a batch without rows or with different
            numbers of them, an axis that the mesh does not have, parameters that are split over it.

    Source: Gao et al., 2021, arXiv:2101.06983.

    >>> import jax, jax.numpy as jnp, wholebatch.jax as wbj
    >>> encode = wbj.chunked(lambda w, x: jnp.tanh(x @ w), chunk_size=2)
    >>> encode(jnp.ones((3, 4)), jnp.ones((5, 3))).shape
    (5, 4)
    """
    sizes = [n for n in (chunk_size, num_chunks) if n is not None]
    if len(sizes) != 1 or not checks.is_integer(sizes[0]) or sizes[0] < 1:
        raise ValueError(
            f"exactly one of chunk_size and num_chunks must be an integer >= 1, got {chunk_size} and {num_chunks}"
        )
    if grad_dtype is not None and not jnp.issubdtype(grad_dtype, jnp.floating):
        raise ValueError(f"grad_dtype must be floating point, got {grad_dtype}")

    def encode(params: Any, batch: Any, key: Array | None = None) -> Any:
        devices = _Devices.of(mesh, axis, batch)
        rows = _rows(batch)
        b = ceil(rows / devices.number)
        c = min(b, chunk_size) if chunk_size is not None else ceil(b / min(b, num_chunks or 1))
        n = ceil(b / c)

        def cut(x: Array) -> Array:
            """(b, ...) -> (n, c, ...)."""
            return _extended(x, n * c - b).reshape(n, c, *x.shape[1:])

        def joined(x: Array) -> Array:
            """(n, c, ...) -> (b, ...)."""
            return x.reshape(n * c, *x.shape[2:])[:b]

        wide = jax.tree.map(lambda w: _cast(w, grad_dtype), params)  # outside of shard_map: its sum has this dtype, too

        def over_chunks(wide: Any, chunks: Any, key: Array | None, examples: int) -> Any:
            """Encode chunks of so many examples each."""

            def encode_chunk(_: None, chunk: tuple[Any, Array | None]) -> tuple[None, Any]:
                inputs, chunk_key = chunk
                encoded = encode_fn(
                    jax.tree.map(_like, wide, params), inputs, *() if chunk_key is None else (chunk_key,)
                )
                if any(jnp.shape(z)[:1] != (examples,) for z in jax.tree.leaves(encoded)):
                    shapes = ", ".join(str(jnp.shape(z)) for z in jax.tree.leaves(encoded))
                    raise ValueError(f"encode_fn must return a row for each of {examples} examples, got {shapes}")
                return None, encoded

            keys = None if key is None else jax.random.split(key, n)
            return lax.scan(jax.checkpoint(encode_chunk, policy=policy, prevent_cse=False), None, (chunks, keys))[1]

        def on_device(wide: Any, batch: Any, key: Array | None) -> Any:
            return jax.tree.map(joined, over_chunks(_local(wide, batch), jax.tree.map(cut, batch), key, c))

        whole = jax.tree.map(lambda x: _extended(jnp.asarray(x), devices.number * b - rows), batch)
        if per_device or devices.mesh is None:
            encoded = devices.run(on_device, wide, whole, key)
        else:
            chunks = over_chunks(wide, devices.on_each(cut, whole, 0, 1), key, c * devices.number)
            encoded = devices.on_each(joined, chunks, 1, 0)
        return jax.tree.map(lambda x: first_rows(x, rows, devices.mesh), encoded)

    return encode


def _local(params: Any, batch: Any) -> Any:
    """Mark parameters as varying over the axes that the batch varies over: their gradients are summed once."""
    names = frozenset().union(*(varies_over(x) for x in jax.tree.leaves(batch)))
    return jax.tree.map(lambda w: vary(jnp.asarray(w), names) if _is_array(w) else w, params)


class _Devices:
    """The devices that a batch is split over."""

    def __init__(self, mesh: Mesh | AbstractMesh | None, names: tuple[str, ...]) -> None:
        self.mesh, self.names = mesh, names
        self.number = 1 if mesh is None else prod(mesh.shape[name] for name in names)

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh | None, axis: AxisNames, batch: Any) -> _Devices:
        names = checks.names(axis)
        if mesh is None:
            around = jax.sharding.get_abstract_mesh()
            if around.empty or AxisType.Manual in around.axis_types:
                check_not_split(batch)
                return cls(None, names)
            mesh = around
        check_axes(mesh, names)
        return cls(mesh, names)

    def run(self, function: Callable[..., Any], params: Any, batch: Any, key: Array | None) -> Any:
        """Call a function on each device, with its rows, whole parameters, and a key of its own."""
        if (mesh := self.mesh) is None:
            return function(params, batch, key)
        leaves, structure = jax.tree.flatten(params)
        arrays = {index: leaf for index, leaf in enumerate(leaves) if _is_array(leaf)}
        for leaf in arrays.values():
            if over := explicit_axes(leaf) & set(self.names):
                raise ValueError(
                    f"parameters are split over {', '.join(map(repr, sorted(over)))}, as the batch is: with "
                    "per_device=False encode_fn gets all devices' rows and combines them with the parameters itself"
                )

        def on_device(arrays: dict[int, Array], batch: Any, key: Array | None) -> Any:
            merged = jax.tree.unflatten(structure, [arrays.get(index, leaf) for index, leaf in enumerate(leaves)])
            local_key = None if key is None else jax.random.fold_in(key, lax.axis_index(self.names))
            return function(merged, batch, local_key)

        split, everywhere = PartitionSpec(self.names), PartitionSpec()
        batch = jax.tree.map(lambda x: reshard_explicit(x, mesh, split), batch)
        return self._mapped(on_device, (everywhere, split, everywhere), split)(arrays, batch, key)

    def on_each(self, function: Callable[[Array], Array], tree: Any, split: int, split_after: int) -> Any:
        """Apply a function to each device's part of arrays that are split along a dimension, before and after it."""
        mesh = self.mesh
        assert mesh is not None
        before, after = (PartitionSpec(*[None] * dim, self.names) for dim in (split, split_after))
        tree = jax.tree.map(lambda x: reshard_explicit(x, mesh, before), tree)
        return self._mapped(partial(jax.tree.map, function), (before,), after)(tree)

    def _mapped(self, function: Callable[..., Any], in_specs: tuple[PartitionSpec, ...], out_specs: Any) -> Any:
        """Wrap a function in a `jax.shard_map` over the batch's axes only; splits over other axes stay."""
        axes = set(self.names)
        return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes))


def _extended(x: Array, rows: int) -> Array:
    """Append so many copies of the last row, for an encoder may be undefined at zeros."""
    return jnp.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1), mode="edge") if rows else x


def _rows(batch: Any) -> int:
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(counts) != 1 or counts & {(), (0,)}:
        raise ValueError(
            f"all arrays of the batch must have the same number of rows, at least one; got {sorted(counts)}"
        )
    return int(counts.pop()[0])


def _is_array(w: Any) -> bool:
    return isinstance(w, (Array, np.ndarray))


def _like(w: Any, original: Any) -> Any:
    """Cast w to the dtype of `original`."""
    return _cast(w, original.dtype) if isinstance(w, Array) else w


def _cast(w: Any, dtype: Any) -> Any:
    """Cast a floating-point array; anything else a model holds stays, and everything if dtype is None."""
    floats = _is_array(w) and jnp.issubdtype(w.dtype, jnp.floating)
    return w.astype(dtype) if floats and dtype is not None else w
