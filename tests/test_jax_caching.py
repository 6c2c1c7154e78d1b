"""Gradient caching on JAX: encoders in chunks have the values and gradients of the whole batch."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")  # JAX needs Python 3.11
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax_cases import assert_close, compiled, encoder, mesh_of, placed, temporary_bytes  # noqa: E402

import wholebatch.jax as wbj  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64")


def towers(rows=24, dtype=jnp.float64):
    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(5, 16)), "v": random.normal(size=(16, 6))}
    return jax.tree.map(lambda w: jnp.asarray(w, dtype), params), *(
        jnp.asarray(random.normal(size=(rows, 5)), dtype) for _ in "xy"
    )


@pytest.mark.parametrize(
    ("kind", "rows", "chunks"),
    [
        ("auto", 24, {"chunk_size": 2}),
        ("auto", 21, {"chunk_size": 4}),
        ("auto", 21, {"num_chunks": 2}),
        ("auto", 24, {"chunk_size": 100}),
        ("explicit", 24, {"num_chunks": 3}),
        ("explicit", 21, {"chunk_size": 2}),
    ],
)
def test_chunks_have_the_gradient_of_the_batch(kind, rows, chunks):
    params, x, y = towers(rows)
    mesh = mesh_of(4, kind)

    def loss(params, x, y, encode):
        return wbj.clip_loss(encode(params, x), encode(params, y), 1.0, mesh=mesh)

    # With explicit axes it is up to the encoder to say how a gradient of its parameters is to be added up.
    wanted = (0, 1, 2) if kind == "auto" else (1, 2)
    whole = jax.jit(jax.value_and_grad(partial(loss, encode=encoder), wanted))(params, x, y)
    encode = wbj.chunked(encoder, mesh=mesh, **chunks)
    in_chunks = jax.jit(jax.value_and_grad(partial(loss, encode=encode), wanted))(params, x, y)
    assert_close(*([np.asarray(z) for z in jax.tree.leaves(of)] for of in (in_chunks, whole)))


def test_chunks_lie_as_the_batch_does():
    """No device is sent rows, and none encodes another's. The usual reshape makes all of them encode everything."""
    mesh = mesh_of(8, "auto")
    params = {"w": jnp.zeros((5, 16), jnp.float32), "v": jnp.zeros((16, 6), jnp.float32)}
    x = placed(mesh, 64, 5)
    encode = wbj.chunked(encoder, num_chunks=4, mesh=mesh)

    def by_reshape(params, x):
        return wbj.grad_cached(encoder)(params, wbj.tree_chunk(x, 4))

    def loss(encode):
        return lambda params, x: (encode(params, x) ** 2).sum()

    texts = [compiled(loss(of), params, x).as_text() for of in (encode, by_reshape)]
    assert "all-gather" not in texts[0]
    assert "all-to-all" not in texts[0]
    assert "all-gather" in texts[1]
    # Of a chunk's 16 rows a device has 2: f32[2,16] are its activations, f32[16,16] would be everybody's.
    assert [bool(re.search(r"f32\[16,16\]\S* dot\([^\n]*x", text)) or "f32[2,16]" not in text for text in texts] == [
        False,
        True,
    ]


def test_chunks_take_the_memory_of_one():
    params = {"w": jnp.zeros((64, 512), jnp.float32), "v": jnp.zeros((512, 8), jnp.float32)}
    x = jnp.zeros((4096, 64), jnp.float32)
    whole, in_chunks = (
        temporary_bytes(lambda params, of=of: (of(params, x) ** 2).sum(), params)
        for of in (encoder, wbj.chunked(encoder, chunk_size=64))
    )
    assert in_chunks < whole / 8


def test_gradients_added_up_in_float32():
    """Of parameters in bfloat16, over 256 chunks: in their own dtype small contributions are lost."""
    params, x, _ = towers(256)
    params, x = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), jnp.abs(x.astype(jnp.bfloat16))

    def gradient(encode, params, x):
        return jax.tree.leaves(jax.grad(lambda params: encode(params, x).astype(jnp.float32).sum())(params))

    exact = gradient(encoder, *jax.tree.map(lambda w: w.astype(jnp.float64), (params, x)))
    errors = []
    for dtype in (jnp.float32, None):
        found = gradient(wbj.chunked(encoder, chunk_size=1, grad_dtype=dtype), params, x)
        assert all(g.dtype == jnp.bfloat16 for g in found)
        errors.append(max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, exact, strict=True)))
    assert errors[0] < 0.01 < errors[1]


def test_each_chunk_has_a_key_of_its_own_twice():
    """The backward pass drops what the forward pass dropped: the gradient is that of the representations that came."""
    params, x, _ = towers()
    encode, key = wbj.chunked(encoder, chunk_size=8), jax.random.key(1)
    keys = jax.random.split(key, 3)

    def by_hand(params):
        return jnp.concatenate([encoder(params, x[8 * at : 8 * at + 8], keys[at]) for at in range(3)])

    expected = jax.vjp(by_hand, params)
    found = jax.vjp(lambda params: encode(params, x, key), params)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    cotangent = jnp.ones_like(found[0])
    assert_close(*([0, *map(np.asarray, jax.tree.leaves(of[1](cotangent)))] for of in (found, expected)))


def test_grad_caches_own_names():
    """The steps of GradCache's JAX code, by its names, on today's JAX."""
    params, x, y = towers()

    def whole(params):
        return wbj.clip_loss(encoder(params, x), encoder(params, y), 1.0)

    expected = jax.value_and_grad(whole)(params)
    source, target = wbj.tree_chunk(x, 8), wbj.tree_chunk(y, 8)
    assert wbj.tree_unchunk({"x": source})["x"].shape == x.shape

    @wbj.grad_cached
    def forward(params, batch):
        return encoder(params, batch)

    def compute_loss(params, source, target):
        return wbj.clip_loss(forward(params, source), forward(params, target), 1.0)

    found = jax.jit(jax.value_and_grad(compute_loss))(params, source, target)
    assert_close(*([np.asarray(z) for z in jax.tree.leaves(of)] for of in (found, expected)))

    encode = wbj.chunk_encode(partial(encoder, params))
    h_source, h_target = encode(x=source), encode(x=target)
    loss = wbj.unchunk_args(axis=0, argnums=(0, 1))(lambda hs, ht: wbj.clip_loss(hs, ht, 1.0))
    value, cached = jax.value_and_grad(loss, (0, 1))(h_source, h_target)
    add_grad, grads = wbj.cache_grad(encoder), jax.tree.map(jnp.zeros_like, params)
    for chunks, of_tower in zip((source, target), cached, strict=True):
        grads = add_grad(params, grads, of_tower, x=chunks)
    assert_close(*([np.asarray(z) for z in jax.tree.leaves(of)] for of in ((value, grads), expected)))

    def local_mean(hs, ht, axis):
        """A loss among all targets, of this device's sources: the form that GradCache's users have."""
        everyone = jax.lax.all_gather(ht, axis, tiled=True)
        first = jax.lax.axis_index(axis) * len(hs)
        logits = hs @ everyone.T
        own = jnp.take_along_axis(logits, first + jnp.arange(len(hs))[:, None], 1)
        return jax.nn.logsumexp(logits, 1) - own[:, 0]

    def one_direction(params):
        return wbj.info_nce_loss(encoder(params, x), encoder(params, y), logit_scale=1.0)

    symmetric = partial(wbj.clip_loss_local, logit_scale=1.0)
    for loss_fn, twin_of in (
        (lambda hs, ht, axis: symmetric(hs, ht, axis_name=axis), whole),
        (local_mean, one_direction),
    ):
        expected = jax.value_and_grad(twin_of)(params)
        step = partial(wbj.cache_train_step, loss_fn)
        on = jax.P(None, "device")
        train_step = jax.shard_map(
            step, mesh=mesh_of(4, "auto", ("device",)), in_specs=(jax.P(), on, on), out_specs=(jax.P(), jax.P())
        )
        inputs = [{"x": wbj.tree_chunk(z, 2)} for z in (x, y)]
        found = jax.jit(train_step)(TrainState(encoder, params, ()), *inputs)
        assert_close(*([np.asarray(z) for z in jax.tree.leaves(of)] for of in ((found[0], found[1].log), expected)))


@partial(jax.tree_util.register_dataclass, data_fields=["params", "log"], meta_fields=["apply_fn"])
@dataclass
class TrainState:
    """As flax's: applies gradients, by optax, and here remembers them."""

    apply_fn: Callable
    params: dict
    log: Any

    def apply_gradients(self, *, grads):
        optimiser = optax.sgd(0.1)
        updates, _ = optimiser.update(grads, optimiser.init(self.params))
        return TrainState(self.apply_fn, optax.apply_updates(self.params, updates), grads)


def test_parameters_of_any_kind():
    """A model has numbers and functions in it, too."""
    _, x, _ = towers()
    params = {"w": jnp.ones((5, 3), jnp.bfloat16), "times": 2.0, "activation": jnp.tanh, "n": 3}

    def of_model(params, x):
        return params["activation"](x @ params["w"].astype(x.dtype)) * params["times"] * params["n"]

    for settings in ({}, {"grad_dtype": jnp.float32}):
        found = wbj.chunked(of_model, chunk_size=5, **settings)(params, x)
        np.testing.assert_allclose(found, of_model(params, x), rtol=1e-12)


def test_any_axis_in_chunks():
    x = jnp.arange(24).reshape(2, 12)
    for axis, other in ((1, -1), (0, -2)):
        chunks = wbj.tree_chunk(x, 2, axis)
        assert jnp.array_equal(chunks, wbj.tree_chunk(x, 2, other))
        assert jnp.array_equal(wbj.tree_unchunk(chunks, axis), x)
        assert jnp.array_equal(wbj.tree_unchunk(chunks, other), x)
