r"""Gradient caching: activations live for one chunk of the batch at a time, and the gradient is that of the whole.

In JAX that is rematerialization inside of a scan: `lax.scan` over chunks keeps each chunk's representations, and
`jax.checkpoint` its inputs, of which the backward pass makes the rest again. :func:`chunked` is all of it.

The functions below it do the same in steps, by the names that GradCache's JAX code has (Gao et al., 2021,
arXiv:2101.06983): representations of all chunks, the gradient of the loss by them, and the encoder's by that.

A batch that is split over devices must not be cut into chunks by a plain reshape: (B, ...) -> (n, B / n, ...) makes
whole devices' rows one chunk, and the chunks, not the rows in them, are then what is split; XLA gathers them again, and
devices encode each other's rows. Each device has to cut its own (b, ...) into (n, c, ...).

Nor should the devices add their gradients up chunk by chunk, which is what XLA makes of a scan over arrays that are
split: n sums of all parameters in the place of one. So the scan runs on each device by itself, with parameters that
count as its own; they are made so once before it, and the derivative of that is one sum behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from . import checks
from .axis import varies_over, vary
from .mesh import AxisNames, check_axes, explicit_axes, first_rows, placed, refuse_split


def chunked(
    encode_fn: Callable[..., Any],
    *,
    chunk_size: int | None = None,
    num_chunks: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis: AxisNames = "data",
    per_device: bool = True,
    grad_dtype: Any = None,
    policy: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    r"""An encoder that takes batches whose activations would not fit: same values, same gradients.

    encode(params, batch) = concatenate(encode_fn(params, chunk) for chunk in batch)

    Args:
        encode_fn: of parameters and a batch, a tree of arrays with a row for each example; a tree of representations
            likewise. Rows must not look at one another (no batch statistics).
        chunk_size: examples of a chunk, on each device.
        num_chunks: or how many chunks there are at most. The last is filled with copies of the last rows, which are cut
            off.
        mesh: over which the batch is split; None: that of `jax.set_mesh`, if there is one. Inside of a
            `jax.shard_map` a device has its own rows, and there is none.
        axis: of the mesh, over which the batch's rows are split.
        per_device: encode_fn gets the rows of one device, inside of a `jax.shard_map` over `axis`, in which parameters
            are whole, and their gradients are added up over the devices once. False: it gets those of all, W times as
            many, as one array that is split: for parameters that are themselves split over this axis (FSDP); XLA then
            adds gradients up, and brings parameters together, with each chunk.
        grad_dtype: in which the parameters' gradients are added up over chunks and devices, such as float32 for
            parameters in bfloat16; None: their own. It takes a copy of the parameters in that dtype.
        policy: what `jax.checkpoint` keeps of a chunk; None: nothing.

    Returns:
        encode(params, batch, key=None). With a `key` of `jax.random` each chunk of each device gets one of its own, as
        encode_fn(params, chunk, key), and the same one when it is encoded again.

    The encoder runs forward twice. Collectives: one all-reduce of the parameters' gradient, as without chunks, and more
    where rows do not divide over the devices. Call it under `jit`: outside it compiles each time.

    Raises:
        ValueError: while tracing: not one of chunk_size and num_chunks, a batch without rows or with differing ones, an
            axis that the mesh does not have, parameters that are split over it.

    Source: Gao et al., 2021, arXiv:2101.06983.

    >>> import jax, jax.numpy as jnp, wholebatch.jax as wbj
    >>> encode = wbj.chunked(lambda w, x: jnp.tanh(x @ w), chunk_size=2)
    >>> encode(jnp.ones((3, 4)), jnp.ones((5, 3))).shape
    (5, 4)
    """
    sizes = [n for n in (chunk_size, num_chunks) if n is not None]
    if len(sizes) != 1 or not checks.is_integer(sizes[0]) or sizes[0] < 1:
        raise ValueError(f"give one of chunk_size and num_chunks, an integer >= 1; got {chunk_size} and {num_chunks}")
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
            return _longer(x, n * c - b).reshape(n, c, *x.shape[1:])

        def joined(x: Array) -> Array:
            """(n, c, ...) -> (b, ...)."""
            return x.reshape(n * c, *x.shape[2:])[:b]

        wide = jax.tree.map(lambda w: _cast(w, grad_dtype), params)  # before the devices part: they add up in it, too

        def over_chunks(wide: Any, chunks: Any, key: Array | None, examples: int) -> Any:
            """Of chunks with so many examples each."""

            def one(_: None, chunk: tuple[Any, Array | None]) -> tuple[None, Any]:
                inputs, local_key = chunk
                encoded = encode_fn(
                    jax.tree.map(_like, wide, params), inputs, *() if local_key is None else (local_key,)
                )
                if any(jnp.shape(z)[:1] != (examples,) for z in jax.tree.leaves(encoded)):
                    shapes = ", ".join(str(jnp.shape(z)) for z in jax.tree.leaves(encoded))
                    raise ValueError(f"encode_fn must give a row for each of {examples} examples, got {shapes}")
                return None, encoded

            keys = None if key is None else jax.random.split(key, n)
            return lax.scan(jax.checkpoint(one, policy=policy, prevent_cse=False), None, (chunks, keys))[1]

        def on_device(wide: Any, batch: Any, key: Array | None) -> Any:
            return jax.tree.map(joined, over_chunks(_local(wide, batch), jax.tree.map(cut, batch), key, c))

        whole = jax.tree.map(lambda x: _longer(jnp.asarray(x), devices.number * b - rows), batch)
        if per_device or devices.mesh is None:
            encoded = devices.run(on_device, wide, whole, key)
        else:
            of_chunks = over_chunks(wide, devices.on_each(cut, whole, 0, 1), key, c * devices.number)
            encoded = devices.on_each(joined, of_chunks, 1, 0)
        return jax.tree.map(lambda x: first_rows(x, rows, devices.mesh), encoded)

    return encode


def _local(params: Any, batch: Any) -> Any:
    """Parameters of which each device that has rows of its own has its own: their gradients are added up once."""
    names = frozenset().union(*(varies_over(x) for x in jax.tree.leaves(batch)))
    return jax.tree.map(lambda w: vary(jnp.asarray(w), names) if _is_array(w) else w, params)


class _Devices:
    """Those that a batch is split over."""

    def __init__(self, mesh: Mesh | AbstractMesh | None, names: tuple[str, ...]) -> None:
        self.mesh, self.names = mesh, names
        self.number = 1 if mesh is None else prod(mesh.shape[name] for name in names)

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh | None, axis: AxisNames, batch: Any) -> _Devices:
        names = checks.names(axis)
        if mesh is None:
            around = jax.sharding.get_abstract_mesh()
            if around.empty or AxisType.Manual in around.axis_types:
                refuse_split(batch)
                return cls(None, names)
            mesh = around
        check_axes(mesh, names)
        return cls(mesh, names)

    def run(self, function: Callable[..., Any], params: Any, batch: Any, key: Array | None) -> Any:
        """On each device, of its rows, with whole parameters and a key of its own."""
        if (mesh := self.mesh) is None:
            return function(params, batch, key)
        leaves, structure = jax.tree.flatten(params)
        arrays = {at: leaf for at, leaf in enumerate(leaves) if _is_array(leaf)}
        for leaf in arrays.values():
            if over := explicit_axes(leaf) & set(self.names):
                raise ValueError(
                    f"parameters are split over {', '.join(map(repr, sorted(over)))}, as the batch is: with "
                    "per_device=False encode_fn gets all devices' rows, and says itself how they meet"
                )

        def on_device(arrays: dict[int, Array], batch: Any, key: Array | None) -> Any:
            merged = jax.tree.unflatten(structure, [arrays.get(at, leaf) for at, leaf in enumerate(leaves)])
            local_key = None if key is None else jax.random.fold_in(key, lax.axis_index(self.names))
            return function(merged, batch, local_key)

        split, everywhere = PartitionSpec(self.names), PartitionSpec()
        batch = jax.tree.map(lambda x: placed(x, mesh, split), batch)
        return self._mapped(on_device, (everywhere, split, everywhere), split)(arrays, batch, key)

    def on_each(self, function: Callable[[Array], Array], tree: Any, split: int, split_after: int) -> Any:
        """Apply a function to each device's part of arrays, which are split along one dimension, and then another."""
        mesh = self.mesh
        assert mesh is not None
        before, after = (PartitionSpec(*[None] * dim, self.names) for dim in (split, split_after))
        tree = jax.tree.map(lambda x: placed(x, mesh, before), tree)
        return self._mapped(partial(jax.tree.map, function), (before,), after)(tree)

    def _mapped(self, function: Callable[..., Any], in_specs: tuple[PartitionSpec, ...], out_specs: Any) -> Any:
        """Over the batch's axes alone: what is split over others stays as it is."""
        axes = set(self.names)
        return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes))


def _longer(x: Array, rows: int) -> Array:
    """With its last row so many times more: an encoder may have no value for zeros."""
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


def _like(w: Any, local: Any) -> Any:
    """In the dtype that it had."""
    return _cast(w, local.dtype) if isinstance(w, Array) else w


def _cast(w: Any, dtype: Any) -> Any:
    """Of a floating-point array; whatever else a model holds stays, and all if there is no dtype."""
    floats = _is_array(w) and jnp.issubdtype(w.dtype, jnp.floating)
    return w.astype(dtype) if floats and dtype is not None else w


# GradCache's names.


def tree_chunk(tree: Any, n_chunk: int, axis: int = 0) -> Any:
    """Cut an axis of each array into n_chunk equal parts, which become a new axis before it.

    On one device, or inside of a `jax.shard_map`: for a batch that is split over devices use :func:`chunked`.

    Raises:
        ValueError: the axis does not divide.
    """

    def of(x: Array) -> Array:
        at = _place_of(axis, x.ndim)
        rows = x.shape[at]
        if n_chunk < 1 or rows % n_chunk:
            raise ValueError(
                f"{rows} rows do not divide into {n_chunk} chunks; wholebatch.jax.chunked takes any number"
            )
        return jnp.reshape(x, (*x.shape[:at], n_chunk, rows // n_chunk, *x.shape[at + 1 :]))

    return jax.tree.map(of, tree)


def tree_unchunk(tree: Any, axis: int = 0) -> Any:
    """The other way: an axis and the one after it become one."""

    def of(x: Array) -> Array:
        at = _place_of(axis, x.ndim - 1)  # of the axes that there will be
        return jnp.reshape(x, (*x.shape[:at], -1, *x.shape[at + 2 :]))

    return jax.tree.map(of, tree)


def _place_of(axis: int, of: int) -> int:
    if not -of <= axis < of:
        raise ValueError(f"axis must be within [{-of}, {of}) for an array of {of} axes, got {axis}")
    return axis % of


def chunk_encode(encode_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Of encode_fn(**chunk) a function of chunks, whose representations it stacks: the first pass, without gradient."""

    def encode(**chunks: Any) -> Any:
        return lax.map(lambda chunk: encode_fn(**chunk), chunks)

    return encode


def cache_grad(encode_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Of encode_fn(params, **chunk) a function that adds its gradient over chunks, given that of the representations.

    add_grad(params, accumulator, cached_grad, **chunks) = accumulator + sum_k J_k^T cached_grad_k

    The accumulator is a tree like params; what it is given in, float32 perhaps, sums are kept in.
    """

    def add_grad(params: Any, accumulator: Any, cached_grad: Any, **chunks: Any) -> Any:
        def step(sums: Any, of_chunk: tuple[Any, Any]) -> tuple[Any, None]:
            cotangents, chunk = of_chunk
            _, pull_back = jax.vjp(lambda params: encode_fn(params=params, **chunk), params)
            (grad,) = pull_back(cotangents)
            return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grad), None

        return lax.scan(step, accumulator, (cached_grad, chunks))[0]

    return add_grad


def unchunk_args(axis: int = 0, argnums: Iterable[int] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: some arguments come in chunks, and the function gets them whole."""
    numbers = frozenset(argnums)

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def unchunked(*args: Any, **kwargs: Any) -> Any:
            return function(*(tree_unchunk(x, axis) if at in numbers else x for at, x in enumerate(args)), **kwargs)

        return unchunked

    return decorator


def grad_cached(
    encode_fn: Callable[..., Any], policy: Callable[..., bool] | None = None, prevent_cse: bool = True
) -> Callable[..., Any]:
    """Of encode_fn(params, chunk) a function of chunks, as `tree_chunk` makes them; all rows below one another.

    :func:`chunked` takes the batch as it is, on any number of devices.
    """

    def encode(params: Any, chunks: Any) -> Any:
        def one(_: None, chunk: Any) -> tuple[None, Any]:
            return None, encode_fn(params, chunk)

        _, encoded = lax.scan(jax.checkpoint(one, policy=policy, prevent_cse=prevent_cse), None, chunks)
        return tree_unchunk(encoded)

    return encode


def cache_train_step(
    loss_fn: Callable[..., Array], state: Any, ss: dict[str, Any], tt: dict[str, Any], axis: str = "device"
) -> tuple[Array, Any]:
    """One step of training two towers with shared parameters, on chunks, inside of a `jax.shard_map` over `axis`.

    Args:
        loss_fn: of both towers' representations, all of this device's rows, and axis=; its mean is the loss.
        state: with apply_fn, params and apply_gradients, such as flax's `TrainState`.
        ss: the one tower's inputs, by keyword, in chunks.
        tt: the other's.
        axis: over which losses and gradients are averaged.

    Returns:
        The mean of the devices' losses, and the state after a step along its gradient. A loss that JAX knows to be the
        same on all devices, such as :func:`wholebatch.jax.clip_loss_local`, is its own mean.
    """

    def encode(params: Any, **inputs: Any) -> Any:
        return state.apply_fn(params=params, **inputs)

    # What varies stays this device's own until it is added up below; where JAX keeps no record, nothing has to be said.
    names = frozenset({axis}) & frozenset().union(*(varies_over(x) for x in jax.tree.leaves((ss, tt))))
    params = jax.tree.map(lambda w: vary(w, names), state.params)
    encode_chunks, add_grad = chunk_encode(partial(encode, params)), cache_grad(encode)

    @unchunk_args(axis=0, argnums=(0, 1))
    def mean_loss(xx: Any, yy: Any) -> Array:
        return jnp.mean(loss_fn(xx, yy, axis=axis))

    loss, of_towers = jax.value_and_grad(mean_loss, argnums=(0, 1))(encode_chunks(**ss), encode_chunks(**tt))
    grads = jax.tree.map(jnp.zeros_like, params)
    for inputs, of_tower in zip((ss, tt), of_towers, strict=True):
        grads = add_grad(params, grads, of_tower, **inputs)
    if names and not names & varies_over(loss):  # one loss, of which each device has its share of the gradient
        return loss, state.apply_gradients(grads=lax.psum(grads, axis))
    loss, grads = lax.pmean((loss, grads), axis)
    return loss, state.apply_gradients(grads=grads)
