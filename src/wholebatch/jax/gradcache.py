"""Gradient caching in separate steps, by the names of GradCache's JAX code (Gao et al., 2021, arXiv:2101.06983).

First the representations of all chunks, then the gradient of the loss with respect to them, then from these the
encoder's gradient. On several devices :func:`wholebatch.jax.chunked` does all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .axis import varies_over, vary


class _TrainState(Protocol):
    """The part of flax's `TrainState` that a step uses."""

    @property
    def apply_fn(self) -> Callable[..., Any]: ...

    @property
    def params(self) -> Any: ...

    @property
    def apply_gradients(self) -> Callable[..., Any]: ...


_R = TypeVar("_R")
_Tree = TypeVar("_Tree")
_State = TypeVar("_State", bound=_TrainState)


def tree_chunk(tree: _Tree, n_chunk: int, axis: int = 0) -> _Tree:
    """Cut an axis of each array into n_chunk equal parts, which become a new axis before it.

    For one device, or inside of a `jax.shard_map`: for a batch that is split over devices use
    :func:`wholebatch.jax.chunked`.

    Raises:
        ValueError: the axis does not exist, or does not divide.
    """

    def cut(x: Array) -> Array:
        dim = _checked_axis(axis, x.ndim)
        rows = x.shape[dim]
        if n_chunk < 1 or rows % n_chunk:
            raise ValueError(
                f"{rows} rows do not divide into {n_chunk} chunks; wholebatch.jax.chunked accepts any number"
            )
        return jnp.reshape(x, (*x.shape[:dim], n_chunk, rows // n_chunk, *x.shape[dim + 1 :]))

    return jax.tree.map(cut, tree)


def tree_unchunk(tree: _Tree, axis: int = 0) -> _Tree:
    """Join an axis of each array and the one after it into one: the inverse of :func:`tree_chunk`."""

    def join(x: Array) -> Array:
        dim = _checked_axis(axis, x.ndim - 1)  # of the axes of the result
        return jnp.reshape(x, (*x.shape[:dim], -1, *x.shape[dim + 2 :]))

    return jax.tree.map(join, tree)


def _checked_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis must be within [{-ndim}, {ndim}) for an array of {ndim} axes, got {axis}")
    return axis % ndim


def chunk_encode(encode_fn: Callable[..., _Tree]) -> Callable[..., _Tree]:
    """Turn encode_fn(**chunk) into a function of all chunks that stacks their representations, without a gradient.

    This is the first pass.
    """

    def encode(**chunks: Any) -> Any:
        return lax.map(lambda chunk: encode_fn(**chunk), chunks)

    return encode


def cache_grad(encode_fn: Callable[..., object]) -> Callable[..., Any]:  # returns a tree like the accumulator
    """Turn encode_fn(params, **chunk) into a function that adds its gradient over chunks to an accumulator.

    add_grad(params, accumulator, cached_grad, **chunks) = accumulator + sum_k J_k^T cached_grad_k

    cached_grad is the gradient with respect to the representations. The accumulator is a tree like params; sums have
    its dtype, which may be float32.
    """

    def add_grad(params: Any, accumulator: Any, cached_grad: Any, **chunks: Any) -> Any:
        def step(sums: Any, cotangents_and_chunk: tuple[Any, Any]) -> tuple[Any, None]:
            cotangents, chunk = cotangents_and_chunk
            _, pull_back = jax.vjp(lambda params: encode_fn(params=params, **chunk), params)
            (grad,) = pull_back(cotangents)
            return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grad), None

        return lax.scan(step, accumulator, (cached_grad, chunks))[0]

    return add_grad


def unchunk_args(axis: int = 0, argnums: Iterable[int] = ()) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Decorate a function so that the arguments `argnums` are joined by :func:`tree_unchunk` before the call."""
    numbers = frozenset(argnums)

    def decorator(function: Callable[..., _R]) -> Callable[..., _R]:
        @wraps(function)
        def unchunked(*args: object, **kwargs: object) -> _R:
            return function(*(tree_unchunk(x, axis) if i in numbers else x for i, x in enumerate(args)), **kwargs)

        return unchunked

    return decorator


def grad_cached(
    encode_fn: Callable[..., _Tree], policy: Callable[..., bool] | None = None, prevent_cse: bool = True
) -> Callable[..., _Tree]:
    """Turn encode_fn(params, chunk) into a function of the chunks of :func:`tree_chunk` that returns all rows.

    The backward pass encodes each chunk again. :func:`wholebatch.jax.chunked` takes an uncut batch, on any number of
    devices.

    Args:
        encode_fn: the encoder of one chunk.
        policy: the values of a chunk that `jax.checkpoint` keeps; None keeps none.
        prevent_cse: as in `jax.checkpoint`.
    """

    def encode(params: Any, chunks: Any) -> Any:
        def encode_chunk(_: None, chunk: Any) -> tuple[None, Any]:
            return None, encode_fn(params, chunk)

        _, encoded = lax.scan(jax.checkpoint(encode_chunk, policy=policy, prevent_cse=prevent_cse), None, chunks)
        return tree_unchunk(encoded)

    return encode


def cache_train_step(
    loss_fn: Callable[..., Array],
    state: _State,
    ss: Mapping[str, object],
    tt: Mapping[str, object],
    axis: str = "device",
) -> tuple[Array, _State]:
    """Train two towers with shared parameters for one step, on chunks, inside of a `jax.shard_map` over `axis`.

    Args:
        loss_fn: takes both towers' representations, all of this device's rows, and axis=; its mean is the loss.
        state: has apply_fn, params and apply_gradients, such as flax's `TrainState`.
        ss: the inputs of one tower, by keyword, in chunks.
        tt: the inputs of the other tower.
        axis: the axis over which losses and gradients are averaged.

    Returns:
        The mean of the devices' losses, and the state after a step along its gradient. A loss that JAX knows to be the
        same on all devices, such as :func:`wholebatch.jax.clip_loss_local`, is its own mean.
    """

    def encode(params: Any, **inputs: Any) -> Any:
        return state.apply_fn(params=params, **inputs)

    # Gradients stay local to this device until they are summed below; without check_vma nothing has to be marked.
    names = frozenset({axis}) & frozenset().union(*(varies_over(x) for x in jax.tree.leaves((ss, tt))))
    params = jax.tree.map(lambda w: vary(w, names), state.params)
    encode_chunks, add_grad = chunk_encode(partial(encode, params)), cache_grad(encode)

    @unchunk_args(axis=0, argnums=(0, 1))
    def mean_loss(xx: Any, yy: Any) -> Array:
        return jnp.mean(loss_fn(xx, yy, axis=axis))

    loss, tower_grads = jax.value_and_grad(mean_loss, argnums=(0, 1))(encode_chunks(**ss), encode_chunks(**tt))
    grads = jax.tree.map(jnp.zeros_like, params)
    for inputs, tower_grad in zip((ss, tt), tower_grads, strict=True):
        grads = add_grad(params, grads, tower_grad, **inputs)
    if names and not names & varies_over(loss):  # one replicated loss, of which each device has a share of the gradient
        return loss, state.apply_gradients(grads=lax.psum(grads, axis))
    loss, grads = lax.pmean((loss, grads), axis)
    return loss, state.apply_gradients(grads=grads)
