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
from jax_cases import (  # noqa: E402
    COLLECTIVE,
    assert_close,
    compiled,
    computations,
    encoder,
    mesh_of,
    placed,
    temporary_bytes,
    towers,
)

import wholebatch.jax as wbj  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64")


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

    def loss(params, x, y, encode, mesh):
        return wbj.clip_loss(encode(params, x), encode(params, y), 1.0, mesh=mesh)

    def gradient(encode, mesh):
        return jax.jit(jax.value_and_grad(partial(loss, encode=encode, mesh=mesh), (0, 1, 2)))(params, x, y)

    in_chunks, whole = gradient(wbj.chunked(encoder, mesh=mesh, **chunks), mesh), gradient(encoder, None)
    assert_close(*([np.asarray(z) for z in jax.tree.leaves(of)] for of in (in_chunks, whole)))


def test_split_parameters_are_exact():
    """If parameters are split over the batch's axis, as by FSDP, encode_fn takes all devices' rows."""
    params, x, _ = towers()
    mesh = mesh_of(4, "auto")
    split = jax.device_put(
        params, {"w": jax.NamedSharding(mesh, jax.P(None, "data")), "v": jax.NamedSharding(mesh, jax.P("data"))}
    )

    def loss(params, encode):
        return wbj.sup_con_loss(encode(params, x), jnp.arange(24) // 2)

    encode = wbj.chunked(encoder, chunk_size=2, mesh=mesh, per_device=False)
    found, expected = (jax.jit(jax.value_and_grad(partial(loss, encode=of)))(split) for of in (encode, encoder))
    assert_close(*([np.asarray(z) for z in jax.tree.leaves(of)] for of in (found, expected)))


def test_an_encoder_that_closes_over_its_parameters():
    """The gradient passes through the closure."""
    params, x, _ = towers()

    def loss(params, encode):
        return (encode(partial(encoder, params))(x) ** 2).sum()

    def in_chunks(tower):
        return partial(wbj.chunked(lambda _, x: tower(x), chunk_size=2, mesh=mesh_of(4, "auto")), None)

    found = jax.jit(jax.value_and_grad(partial(loss, encode=in_chunks)))(params)
    expected = jax.value_and_grad(partial(loss, encode=lambda tower: tower))(params)
    assert_close(*([np.asarray(z) for z in jax.tree.leaves(of)] for of in (found, expected)))


def test_chunks_stay_on_the_devices_of_their_rows():
    """No device receives or encodes another's rows; with the usual reshape each encodes four times as many."""
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
    # A device has 2 of a chunk's 16 rows, with activations f32[2,16]; with the reshape it encodes 8 rows.
    assert ["f32[2,16]" in text for text in texts] == [True, False]
    assert ["f32[8,16]" in text for text in texts] == [False, True]


def collectives_in_loops(text):
    """Return the kinds of collectives that run in each iteration of a loop."""
    bodies = computations(text)
    reached, new = set(), set(re.findall(r"body=%?([^\s,)]+)", text))
    while new:
        reached |= new
        called = re.findall(r"(?:calls|to_apply|body|condition)=%?([^\s,)]+)", "".join(bodies[name] for name in new))
        new = set(called) - reached
    return {kind for name in reached for kind in COLLECTIVE.findall(bodies[name])}


@pytest.mark.parametrize("kind", ["a mesh", "a mesh, all rows", "a shard_map"])
def test_gradients_are_summed_over_devices_once(kind):
    """They are not summed for each chunk, unless encode_fn gets all devices' rows."""
    mesh, x = mesh_of(8, "auto"), placed(mesh_of(8, "auto"), 64, 5)
    params = {"w": jnp.zeros((5, 16), jnp.float32), "v": jnp.zeros((16, 6), jnp.float32)}
    settings = {"mesh": mesh, "per_device": kind == "a mesh"} if kind.startswith("a mesh") else {}
    encode = wbj.chunked(encoder, num_chunks=4, **settings)

    def loss(params, x):
        return (encode(params, x) ** 2).sum()

    if kind == "a shard_map":
        loss = jax.shard_map(
            lambda params, x: jax.lax.psum((encode(params, x) ** 2).sum(), "data"),
            mesh=mesh,
            in_specs=(jax.P(), jax.P("data")),
            out_specs=jax.P(),
        )
    text = compiled(loss, params, x).as_text()
    assert " while(" in text
    assert " all-reduce(" in text
    assert collectives_in_loops(text) == ({"all-reduce"} if kind == "a mesh, all rows" else set())


def test_chunks_take_the_memory_of_one():
    params = {"w": jnp.zeros((64, 512), jnp.float32), "v": jnp.zeros((512, 8), jnp.float32)}
    x = jnp.zeros((4096, 64), jnp.float32)
    whole, in_chunks = (
        temporary_bytes(lambda params, of=of: (of(params, x) ** 2).sum(), params)
        for of in (encoder, wbj.chunked(encoder, chunk_size=64))
    )
    assert in_chunks < whole / 8


def test_gradients_are_summed_in_grad_dtype():
    """Gradients of bfloat16 parameters over 256 chunks: summed in bfloat16, small contributions are lost."""
    params, x, _ = towers(256)
    params, x = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), jnp.abs(x.astype(jnp.bfloat16))

    def gradient(encode, params, x):
        return jax.tree.leaves(jax.grad(lambda params: encode(params, x).astype(jnp.float32).sum())(params))

    exact = gradient(encoder, *jax.tree.map(lambda w: w.astype(jnp.float64), (params, x)))
    errors = []
    for dtype, mesh in ((jnp.float32, None), (jnp.float32, mesh_of(8, "auto")), (None, None)):
        found = gradient(wbj.chunked(encoder, chunk_size=1, grad_dtype=dtype, mesh=mesh), params, x)
        assert all(g.dtype == jnp.bfloat16 for g in found)
        errors.append(max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, exact, strict=True)))
    assert max(errors[:2]) < 0.01 < errors[2]


def test_each_chunk_has_its_own_key_in_both_passes():
    """The backward pass drops the same activations as the forward pass, so the gradient is that of the output."""
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


def test_each_device_has_its_own_keys():
    params, x, _ = towers(8)
    x = jnp.broadcast_to(x[:1], x.shape)  # equal rows
    key, mesh = jax.random.key(1), mesh_of(4, "auto")
    encoded = wbj.chunked(encoder, chunk_size=1, mesh=mesh)(params, x, key)
    assert len(np.unique(np.asarray(encoded), axis=0)) == 8
    expected = [
        encoder(params, x[:1], of_chunk)
        for device in range(4)
        for of_chunk in jax.random.split(jax.random.fold_in(key, device), 2)
    ]
    np.testing.assert_allclose(encoded, jnp.concatenate(expected), rtol=1e-12)


def test_the_functions_of_gradcache_are_exact():
    """The functions of GradCache's JAX code, by its names, on current JAX."""
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
        """Return the losses of this device's sources among all targets, as GradCache's users write them."""
        everyone = jax.lax.all_gather(ht, axis, tiled=True)
        first = jax.lax.axis_index(axis) * len(hs)
        logits = hs @ everyone.T
        local = jnp.take_along_axis(logits, first + jnp.arange(len(hs))[:, None], 1)
        return jax.nn.logsumexp(logits, 1) - local[:, 0]

    def one_direction(params):
        return wbj.info_nce_loss(encoder(params, x), encoder(params, y), logit_scale=1.0)

    symmetric = partial(wbj.clip_loss_local, logit_scale=1.0)
    for loss_fn, expected_of in (
        (lambda hs, ht, axis: symmetric(hs, ht, axis_name=axis), whole),
        (local_mean, one_direction),
    ):
        expected = jax.value_and_grad(expected_of)(params)
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
    """A train state like flax's, which also keeps the gradients."""

    apply_fn: Callable
    params: dict
    log: Any

    def apply_gradients(self, *, grads):
        optimizer = optax.sgd(0.1)
        updates, _ = optimizer.update(grads, optimizer.init(self.params))
        return TrainState(self.apply_fn, optax.apply_updates(self.params, updates), grads)


def test_parameters_may_hold_numbers_and_functions():
    """A model may also hold numbers and functions."""
    _, x, _ = towers()
    params = {"w": jnp.ones((5, 3), jnp.bfloat16), "times": 2.0, "activation": jnp.tanh, "n": 3}

    def of_model(params, x):
        return params["activation"](x @ params["w"].astype(x.dtype)) * params["times"] * params["n"]

    for settings in ({}, {"grad_dtype": jnp.float32}):
        found = wbj.chunked(of_model, chunk_size=5, **settings)(params, x)
        np.testing.assert_allclose(found, of_model(params, x), rtol=1e-12)


def test_any_axis_can_be_split_into_chunks():
    x = jnp.arange(24).reshape(2, 12)
    for axis, other in ((1, -1), (0, -2)):
        chunks = wbj.tree_chunk(x, 2, axis)
        assert jnp.array_equal(chunks, wbj.tree_chunk(x, 2, other))
        assert jnp.array_equal(wbj.tree_unchunk(chunks, axis), x)
        assert jnp.array_equal(wbj.tree_unchunk(chunks, other), x)
