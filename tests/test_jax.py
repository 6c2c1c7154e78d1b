"""wholebatch.jax beside the dense twin and beside PyTorch, on one to eight devices that the CPU pretends to have."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import BIAS, whole_batch

import wholebatch as wb

jax = pytest.importorskip("jax")  # JAX needs Python 3.11
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax_cases import (  # noqa: E402
    CASES,
    DEVICES,
    as_jax,
    as_module,
    by_torch,
    mesh_of,
    shards,
    twin,
    values_and_gradients,
)

import wholebatch.jax as wbj  # noqa: E402
from wholebatch.jax.partial_fc import drawn  # noqa: E402

SCALE = 14.3
CORE = [name for name in CASES if name in ("clip", "info_nce", "nt_xent", "siglip", "sup_con")]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def assert_close(found, expected, value=1e-12, gradient=1e-10):
    """The first is the loss; the others are gradients, relative to the largest entry of each."""
    assert len(found) == len(expected)
    for at, (x, y) in enumerate(zip(found, expected, strict=True)):
        error = np.abs(x - y).max(initial=0) / max(1.0, np.abs(y).max(initial=0))
        assert error <= (gradient if at else value), (at, error)


def check_parity(name, rows, mesh, exchange):
    case = CASES[name]
    inputs = shards(case, rows, 4)
    found = values_and_gradients(case, inputs, SCALE, BIAS, mesh=mesh, exchange=exchange, tile=3)
    assert_close(found, twin(case, inputs, SCALE, BIAS))
    assert_close(found, by_torch(wb.functional, case, inputs, SCALE, BIAS))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("devices", "exchange"), [(1, "gather"), *((n, e) for n in (*DEVICES[1:], 3) for e in ("gather", "ring"))]
)
@pytest.mark.parametrize("name", CORE)
def test_parity(name, devices, exchange, kind):
    """Rows that divide over the devices, and rows that do not: of 5 on eight, some have none."""
    rows = 16 if (kind == "explicit") == (devices % 4 == 0) else 5
    check_parity(name, rows, mesh_of(devices, kind), exchange)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in CORE])
def test_parity_of_options(name, exchange):
    check_parity(name, 7, mesh_of(4, "auto"), exchange)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("name", ["clip, label smoothing", "info_nce, few negatives", "nt_xent", "sup_con"])
def test_products_that_are_kept(name, exchange):
    """Of some tiles, and of all: of 3 x 3 numbers of 8 bytes each."""
    case = CASES[name]
    inputs = shards(case, 24, 4)
    for memory in (5 * 72, 10**6):
        settings = {"mesh": mesh_of(4, "auto"), "exchange": exchange, "tile": 3, "memory": memory}
        assert_close(values_and_gradients(case, inputs, SCALE, BIAS, **settings), twin(case, inputs, SCALE, BIAS))


def test_products_take_as_much_memory_as_they_are_given():
    mesh = mesh_of(2, "auto")
    flat, half, all_of_them = (
        temporary_bytes(flat_losses(mesh, exchange="gather", tile=32, memory=memory)["clip"], placed(mesh, 512, 32))
        for memory in ("flat", 2**16 * 2, 2**20)
    )
    assert half - flat == pytest.approx(2**17, rel=0.1)
    assert all_of_them - flat == pytest.approx(256 * 512 * 4, rel=0.1)


# Inside of the caller's own shard_map.


def local_loss(x, y, scale, exchange="ring"):
    return wbj.clip_loss_local(x, y, scale, axis_name="data", exchange=exchange, tile=3)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize(
    "name", ["clip, ids, weights", "info_nce, hard negatives, ids", "nt_xent", "siglip", "sup_con"]
)
def test_local_functions_are_the_same_losses(name, exchange):
    case, mesh = CASES[name], mesh_of(4, "auto")
    inputs = shards(case, 8, 4)
    if len(inputs) > 2 and len(inputs[2]) % 4:
        inputs[2] = torch.cat([inputs[2]] * 4)[: 4 * len(inputs[2])]  # negatives: as many on each device
        inputs[5] = torch.cat([inputs[5]] * 4)[: 4 * len(inputs[5])]
    functions = SimpleNamespace(
        **{
            of: partial(getattr(wbj, f"{of}_local"), axis_name="data", exchange=exchange, tile=3)
            for of in wbj.__all__
            if of.endswith("_loss")
        }
    )
    functions.clip_loss = lambda *args, logit_bias=None, loss=functions.clip_loss, **options: loss(*args, **options)

    def loss(inputs, scale, bias):
        return case.call(functions, *inputs, scale, bias)

    by_rows = jax.shard_map(loss, mesh=mesh, in_specs=(jax.P("data"), jax.P(), jax.P()), out_specs=jax.P())
    wanted = [as_jax(inputs[at]) for at in case.differentiable]

    def of_wanted(wanted, scale, bias):
        given = [as_jax(x) for x in inputs]
        for at, x in zip(case.differentiable, wanted, strict=True):
            given[at] = x
        return by_rows(given, scale, bias)

    value, (of_inputs, *of_scalars) = jax.jit(jax.value_and_grad(of_wanted, (0, 1, 2)))(wanted, SCALE, BIAS)
    of_scalars = [x for x, there_is in zip(of_scalars, (case.has_scale, case.has_bias), strict=True) if there_is]
    assert_close([np.asarray(x) for x in (value, *of_inputs, *of_scalars)], twin(case, inputs, SCALE, BIAS))


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_gradients_taken_inside_and_outside_of_shard_map(exchange):
    case, mesh = CASES["clip"], mesh_of(4, "auto")
    inputs = shards(case, 12, 4)
    x, y = map(as_jax, inputs)
    split = {"mesh": mesh, "in_specs": (jax.P("data"), jax.P("data"), jax.P())}
    loss = partial(local_loss, exchange=exchange)
    outside = jax.value_and_grad(jax.shard_map(loss, **split, out_specs=jax.P()), (0, 1, 2))
    inside = jax.shard_map(
        jax.value_and_grad(loss, (0, 1, 2)), **split, out_specs=(jax.P(), (jax.P("data"), jax.P("data"), jax.P()))
    )
    for function in (outside, inside):
        value, gradients = jax.jit(function)(x, y, SCALE)
        assert_close([np.asarray(z) for z in (value, *gradients)], twin(case, inputs, SCALE, BIAS))


def test_without_vma_checks_gradients_are_off_by_the_number_of_devices():
    """Of sums over devices W times too large inside; of a derivative that one gives oneself, 1/W of it, outside.

    Which is why the functions for a device's rows refuse to be called there.
    """
    mesh, x = mesh_of(4, "auto"), jnp.eye(8)
    split = {"mesh": mesh, "in_specs": (jax.P("data"),), "out_specs": jax.P()}

    def by_hand(x):
        return jax.lax.psum((x**2).sum(), "data")

    own = jax.custom_vjp(by_hand)
    own.defvjp(lambda x: (by_hand(x), x), lambda x, cotangent: (2 * x * cotangent,))
    for unchecked in ({}, {"check_vma": False}):
        inside = jax.shard_map(jax.grad(by_hand), **split | {"out_specs": jax.P("data")}, **unchecked)(x)
        np.testing.assert_allclose(inside, 2 * x * (4 if unchecked else 1))
        outside = jax.grad(jax.shard_map(own, **split, **unchecked))(x)
        np.testing.assert_allclose(outside, 2 * x / (4 if unchecked else 1))
    with pytest.raises(ValueError, match=r"image_features must vary over axis_name='data'.*leave check_vma at True"):
        jax.shard_map(lambda x: local_loss(x, x, 1.0), **split, check_vma=False)(x)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_two_axes_are_one(exchange):
    case = CASES["clip"]
    inputs = shards(case, 12, 8)
    found = values_and_gradients(
        case, inputs, SCALE, BIAS, mesh=mesh_of(8, "auto", ("data", "fsdp")), axis=("data", "fsdp"), exchange=exchange
    )
    assert_close(found, twin(case, inputs, SCALE, BIAS))


def test_an_axis_beside_the_batchs():
    """Of a mesh with another axis, along which every device has the same rows."""
    case = CASES["clip"]
    inputs = shards(case, 12, 4)
    for kind in ("auto", "explicit"):
        found = values_and_gradients(case, inputs, SCALE, BIAS, mesh=mesh_of(8, kind, ("data", "model")))
        assert_close(found, twin(case, inputs, SCALE, BIAS))


def test_the_mesh_that_has_been_set():
    case = CASES["clip"]
    inputs = shards(case, 8, 4)
    with jax.set_mesh(mesh_of(4, "auto")):
        assert_close(values_and_gradients(case, inputs, SCALE, BIAS), twin(case, inputs, SCALE, BIAS))
        with pytest.raises(ValueError, match="axis must name axes of the mesh, got 'batch'; the mesh has 'data'"):
            values_and_gradients(case, inputs, SCALE, BIAS, axis="batch")


# Under JAX's transformations.


def test_vmap_over_temperatures():
    case = CASES["nt_xent"]
    inputs, temperatures = shards(case, 8, 4), np.array([0.05, 0.1, 1.0])
    loss = partial(wbj.nt_xent_loss, *map(as_jax, inputs), mesh=mesh_of(4), exchange="ring", tile=3)
    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(lambda t: loss(temperature=t))))(temperatures)
    for at, temperature in enumerate(temperatures):
        expected = twin(case, inputs, 1 / temperature, BIAS)
        by_temperature = -expected[-1] / temperature**2  # the twin's is by the scale
        assert_close([value[at], gradient[at]], [expected[0], by_temperature])


def test_remat():
    case = CASES["clip"]
    inputs = shards(case, 8, 4)
    x, y = map(as_jax, inputs)
    loss = jax.checkpoint(partial(wbj.clip_loss, mesh=mesh_of(4), exchange="ring", tile=3))
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, y, SCALE)
    assert_close([np.asarray(z) for z in (value, *gradients)], twin(case, inputs, SCALE, BIAS))


@pytest.mark.parametrize("name", ["clip, ids, weights", "nt_xent, ids, weights", "siglip, ids, weights", "sup_con"])
def test_reductions(name):
    """The sum; and the losses of rows, with a gradient for each of them."""
    case, inputs = CASES[name], shards(CASES[name], 7, 4)
    for reduction, kind in (("sum", "auto"), ("none", "explicit")):
        mesh = mesh_of(4, kind)
        weights = torch.linspace(0, 1, 7, dtype=torch.float64) if reduction == "none" else torch.ones(())
        leaves = [z.clone().requires_grad_(z.is_floating_point()) for z in inputs]
        scalars = torch.tensor([SCALE, BIAS], dtype=torch.float64)
        expected = case.call(wb.reference, *leaves, *scalars, reduction=reduction)
        (expected * weights).sum().backward()
        functions = as_module(mesh=mesh, exchange="ring", tile=3, reduction=reduction)
        arrays = [as_jax(z) for z in inputs]

        def loss(x, functions=functions, arrays=arrays):
            return case.call(functions, x, *arrays[1:], SCALE, BIAS)

        assert_close([np.asarray(loss(arrays[0]))], [expected.detach().numpy()])
        cotangents = as_jax(weights)
        gradient = jax.jit(jax.grad(lambda x, loss=loss, of=cotangents: (loss(x) * of).sum()))(arrays[0])
        assert_close([0, np.asarray(gradient)], [0, leaves[0].grad.numpy()])


# Numbers of few bits, and of extreme scales.


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("name", ["clip", "nt_xent", "siglip", "info_nce, both directions, each its own"])
def test_float32_at_any_scale(name, scale):
    case = CASES[name]
    inputs = shards(case, 16, 4)
    found = values_and_gradients(
        case, [z.float() if z.is_floating_point() else z for z in inputs], np.float32(scale), np.float32(BIAS),
        mesh=mesh_of(4), tile=3,
    )  # fmt: skip
    assert_close(
        found, twin(case, [z.float().double() for z in inputs], scale, BIAS), 1e-6 * scale, 2e-5 * max(1, scale / 100)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["clip", "nt_xent", "siglip"])
def test_half_precision_is_summed_in_float32(name, dtype):
    """Beside the twin on the same rounded features; logits in half precision would be off by far more."""
    case = CASES[name]
    rounded = [z.to(torch.bfloat16 if dtype == jnp.bfloat16 else torch.float16) for z in whole_batch(case, (32,), d=64)]
    expected = twin(case, [z.double() for z in rounded], 50.0, BIAS)
    arrays = [as_jax(z.float()).astype(dtype) for z in rounded]
    mesh = mesh_of(4, "auto")

    def loss(x, y, scale):
        return case.call(as_module(mesh=mesh, tile=8), x, y, scale, jnp.float32(BIAS))

    value, (of_x, of_y, of_scale) = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays, jnp.float32(50))
    assert value.dtype == jnp.float32
    assert of_x.dtype == dtype
    found = [np.asarray(z.astype(jnp.float64)) for z in (value, of_x, of_y, of_scale)]
    errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, expected, strict=False)]
    assert abs(found[0] - expected[0]) < 1e-5
    assert max(errors[1:]) < 1e-2
    if name == "clip":
        logits = (arrays[0] @ arrays[1].T) * jnp.asarray(50, dtype)
        naive = -sum(float(jnp.diagonal(jax.nn.log_softmax(logits, axis)).mean()) for axis in (0, 1)) / 2
        assert abs(naive - expected[0]) > 100 * abs(found[0] - expected[0])


def test_a_gradient_is_not_differentiated_again():
    for loss in (
        lambda x: wbj.clip_loss(x, x, 1.0),
        lambda x: wbj.siglip_loss(x, x, 1.0, 0.0),
        lambda x: wbj.siglip_loss(x, x, 1.0, 0.0, reduction="none").sum(),
    ):
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            jax.grad(lambda x, loss=loss: (jax.grad(loss)(x) ** 2).sum())(jnp.eye(3))


@pytest.mark.parametrize("devices", [3, 8])
def test_a_gather_rounds_as_one_piece_does(devices):
    """The largest logit comes home as it is: at a large scale its rounding would be that of the loss."""
    x, y = whole_batch(CASES["clip"], (24,))
    arrays = [as_jax(z.float()) for z in (x, y)]
    loss = partial(wbj.clip_loss, *arrays, np.float32(12345), reduction="none")
    np.testing.assert_allclose(loss(mesh=mesh_of(devices), exchange="gather"), loss(), rtol=0, atol=2e-3)
    same = partial(wbj.clip_loss, arrays[0], arrays[0], np.float32(12345), reduction="none")
    assert np.asarray(same(mesh=mesh_of(devices), exchange="gather")).min() >= -1e-3


# Plausible wrong answers are told apart.


def test_teeth():
    case, mesh = CASES["clip"], mesh_of(4, "auto")
    inputs = shards(case, 12, 4)
    x, y = map(as_jax, inputs)
    expected = twin(case, inputs, SCALE, BIAS)

    def dense(x, y, scale):
        logits = scale * x @ y.T
        own = jnp.diagonal(logits)
        return ((jax.nn.logsumexp(logits, 1) - own).mean() + (jax.nn.logsumexp(logits, 0) - own).mean()) / 2

    def among_own_rows(x, y, scale):
        return jax.lax.pmean(dense(x, y, scale), "data")

    def without_a_gradient_of_others(x, y, scale):
        everyone = jax.lax.stop_gradient(jax.lax.all_gather(y, "data", tiled=True))
        logits = scale * x @ jax.lax.dynamic_update_slice_in_dim(everyone, y, jax.lax.axis_index("data") * len(y), 0).T
        own = scale * (x * y).sum(1)
        return jax.lax.pmean((jax.nn.logsumexp(logits, 1) - own).mean(), "data")

    split = {"mesh": mesh, "in_specs": (jax.P("data"), jax.P("data"), jax.P()), "out_specs": jax.P()}
    right = jax.value_and_grad(dense, (0, 1, 2))(x, y, SCALE)
    assert_close([np.asarray(z) for z in (right[0], *right[1])], expected)
    for wrong in (among_own_rows, without_a_gradient_of_others):
        found = jax.jit(jax.value_and_grad(jax.shard_map(wrong, **split), (0, 1, 2)))(x, y, SCALE)
        with pytest.raises(AssertionError):
            assert_close([np.asarray(z) for z in (found[0], *found[1])], expected, 1e-3, 1e-3)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int8])
def test_ids_of_any_integer_dtype(dtype):
    """An id of 0 is one like any other, also where it is the least of its dtype; negatives without ids are nobody's."""
    case = CASES["clip"]
    (x, y), ids = shards(case, 6, 2), np.array([0, 1, 2, 0, 1, 2])
    negatives = torch.randn(5, x.shape[1], dtype=torch.float64)
    expected = wb.reference.info_nce_loss(x, y, logit_scale=5.0, negatives=negatives, query_ids=torch.tensor(ids))
    for mesh in (None, mesh_of(4, "auto")):
        found = wbj.info_nce_loss(
            *map(as_jax, (x, y)), logit_scale=5.0, negatives=as_jax(negatives), query_ids=ids.astype(dtype), mesh=mesh
        )
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_keys_and_negatives_that_lie_differently():
    """On explicit axes: more keys than queries, split; negatives the same everywhere, and not as many as divide."""
    x, y = shards(CASES["clip"], 8, 4)
    keys, negatives = torch.cat([y, x[:4]]), torch.randn(3, x.shape[1], dtype=torch.float64)
    expected = wb.reference.info_nce_loss(x, keys, logit_scale=5.0, negatives=negatives)
    mesh = mesh_of(4, "explicit")
    split = [jax.device_put(as_jax(z), jax.NamedSharding(mesh, jax.P("data"))) for z in (x, keys)]
    found = partial(wbj.info_nce_loss, logit_scale=5.0, negatives=as_jax(negatives), mesh=mesh)
    np.testing.assert_allclose(found(*split), expected, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(found)(*split), expected, rtol=1e-12)


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


# Memory and messages, by what the compiler says.


def compiled(loss, *arrays):
    return jax.jit(jax.value_and_grad(loss)).lower(*arrays).compile()


def temporary_bytes(loss, *arrays):
    return compiled(loss, *arrays).memory_analysis().temp_size_in_bytes


def placed(mesh, *shape):
    return jax.device_put(jnp.zeros(shape, jnp.float32), jax.NamedSharding(mesh, jax.P("data")))


def flat_losses(mesh, **settings):
    """Of the first tower; d = 32."""
    return {
        "clip": lambda x: wbj.clip_loss(x, x, 10.0, mesh=mesh, **settings),
        "info_nce": lambda x: wbj.info_nce_loss(x, x, logit_scale=10.0, negatives=x, mesh=mesh, **settings),
        "nt_xent": lambda x: wbj.nt_xent_loss(x, x, mesh=mesh, **settings),
        "siglip": lambda x: wbj.siglip_loss(x, x, 10.0, -5.0, mesh=mesh, **settings),
        "sup_con": lambda x: wbj.sup_con_loss(x, jnp.arange(len(x)) // 2, mesh=mesh, **settings),
        "partial_fc": lambda x: wbj.partial_fc_loss(x, jnp.arange(len(x)), x, mesh=mesh, **settings),
    }


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("name", flat_losses(None))
def test_temporary_memory_is_linear_in_rows(name, exchange):
    """Twice the rows, twice the memory; a dense loss takes four times as much."""
    mesh = mesh_of(8, "auto")
    loss = flat_losses(mesh, exchange=exchange, tile=32)[name]
    small, large = (temporary_bytes(loss, placed(mesh, 8 * b, 32)) for b in (128, 512))
    assert large < 4.2 * small


def test_a_dense_loss_is_not_flat():
    mesh = mesh_of(8, "auto")

    def dense(x):
        logits = 10 * x @ x.T
        return (jax.nn.logsumexp(logits, 1) + jax.nn.logsumexp(logits, 0) - 2 * jnp.diagonal(logits)).mean() / 2

    small, large = (temporary_bytes(dense, placed(mesh, 8 * b, 32)) for b in (128, 512))
    assert large > 10 * small


def collectives(loss, *arrays):
    """How many of each kind the compiled program has; those of a ring's middle steps stand there once."""
    text = compiled(loss, *arrays).as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    return dict(Counter(re.findall(rf" ({kinds})(?:-start)?\(", text)))


# Gather: Y and codes, and in the backward pass lse and cotangents; largest of columns and the loss, and scalars'
# gradients; sums of columns, and dY. Ring: Y, codes and sums, on the first step, in the middle, at the end and home.
# NT-Xent's rows bring their norms.
EXPECTED = {
    ("clip", "gather"): {"all-gather": 3, "all-reduce": 2, "reduce-scatter": 2},
    ("nt_xent", "gather"): {"all-gather": 4, "all-reduce": 2, "reduce-scatter": 2},
    ("siglip", "gather"): {"all-gather": 2, "all-reduce": 1, "reduce-scatter": 1},
    ("clip", "ring"): {"collective-permute": 14, "all-reduce": 1},
    ("nt_xent", "ring"): {"collective-permute": 16, "all-reduce": 1},
    ("siglip", "ring"): {"collective-permute": 7, "all-reduce": 1},
}


@pytest.mark.parametrize(("name", "exchange"), EXPECTED)
def test_collectives(name, exchange):
    mesh = mesh_of(8, "auto")
    loss = flat_losses(mesh, exchange=exchange, tile=32)[name]
    assert collectives(loss, placed(mesh, 512, 32)) == EXPECTED[name, exchange]


# Classes split over devices.

MARGINS = {
    "arcface": (wbj.ArcFace(), wb.ArcFace()),
    "cosface": (wbj.CosFace(8.0, 0.2), wb.CosFace(8.0, 0.2)),
    "sphereface": (wbj.SphereFace(16.0), wb.SphereFace(16.0)),
    "normface": (wbj.NormFace(), wb.NormFace()),
    "combined, linear": (
        wbj.CombinedMargin(30.0, 1.0, 0.4, 0.1, fold="linear"),
        wb.heads.CombinedMargin(30.0, 1.0, 0.4, 0.1, fold="linear"),
    ),
    "arcface, clip": (wbj.ArcFace(20.0, 1.5, fold="clip"), wb.ArcFace(20.0, 1.5, fold="clip")),
}


def classes(rows=13, num=11, d=6):
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(n, d, dtype=torch.float64, generator=generator) for n in (rows, num))
    labels = torch.randint(0, num, (rows,), generator=generator)
    x += 2 * w[labels]
    labels[2] = -100
    return x, labels, w, torch.rand(rows, dtype=torch.float64, generator=generator)


def by_torch_classes(function, x, labels, w, weights, **options):
    leaves = [z.clone().requires_grad_() for z in (x, w, weights)]
    loss = function(leaves[0], labels, leaves[1], weights=leaves[2], **options)
    return [z.detach().numpy() for z in (loss, *torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", MARGINS)
def test_partial_fc(name, devices, exchange):
    """13 examples and 11 classes divide over no number of devices; on eight, some have no class."""
    if (devices == 1 and exchange == "ring") or (name != "arcface" and devices in (1, 2)):
        return
    (margin, of_torch), (x, labels, w, weights) = MARGINS[name], classes()
    mesh = mesh_of(devices, "explicit" if devices == 4 else "auto")

    def loss(x, w, weights):
        return wbj.partial_fc_loss(
            x, as_jax(labels), w, margin=margin, weights=weights, mesh=mesh, exchange=exchange, tile=3
        )

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*map(as_jax, (x, w, weights)))
    found = [np.asarray(z) for z in (value, *gradients)]
    for function in (wb.reference.partial_fc_loss, wb.functional.partial_fc_loss):
        assert_close(found, by_torch_classes(function, x, labels, w, weights, margin=of_torch))


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_a_sample_of_classes(exchange):
    """The same on any number of devices, with the batch's own classes; and of it the exact loss and gradient."""
    x, labels, w, weights = classes(rows=9, num=64)
    key, rate = jax.random.key(5), 0.3
    drawn_classes = np.asarray(drawn(key, jnp.arange(64), rate))
    assert 8 < drawn_classes.sum() < 32
    ids = torch.from_numpy(np.flatnonzero(drawn_classes))
    ids = torch.cat([ids, labels[labels >= 0]]).unique()
    assert len(ids) < 40

    def of_sample(x, labels, w, **options):
        return wb.reference.partial_fc_loss(x, labels, w[ids], margin=wb.ArcFace(), class_ids=ids, **options)

    expected = by_torch_classes(of_sample, x, labels, w, weights)
    for devices in (1, 8):

        def loss(x, w, weights, devices=devices):
            return wbj.partial_fc_loss(
                x, as_jax(labels), w, weights=weights, sample_rate=rate, key=key, mesh=mesh_of(devices, "auto"),
                exchange=exchange, tile=8,
            )  # fmt: skip

        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*map(as_jax, (x, w, weights)))
        assert_close([np.asarray(z) for z in (value, *gradients)], expected)
    everything = by_torch_classes(wb.reference.partial_fc_loss, x, labels, w, weights, margin=wb.ArcFace())
    with pytest.raises(AssertionError):
        assert_close([np.asarray(z) for z in (value, *gradients)], everything, 1e-3, 1e-3)


def test_embeddings_that_lie_on_their_centres():
    """theta = 0, where by the cosine the margin has an infinite derivative."""
    x = jnp.eye(3, 4)
    value, gradient = jax.value_and_grad(lambda x: wbj.partial_fc_loss(x, jnp.arange(3), jnp.eye(3, 4)))(x)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_a_label_of_no_class_is_not_passed_over():
    x = jnp.eye(3, 4)
    for label in (3, -1):
        assert np.isnan(wbj.partial_fc_loss(x, jnp.array([0, 1, label]), x))
    assert np.isfinite(wbj.partial_fc_loss(x, jnp.array([0, 1, -100]), x))


# Gradient caching.


def encoder(params, x, key=None):
    h = jnp.tanh(x @ params["w"])
    if key is not None:
        h = h * jax.random.bernoulli(key, 0.5, h.shape)
    return h @ params["v"]


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


# Mistakes.

FEATURES = jnp.ones((6, 4))
MISTAKES = {
    "axis": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, mesh=mesh_of(2), axis="batch"),
        "'batch'; the mesh has 'data'",
    ),
    "rows": (
        lambda: wbj.clip_loss(FEATURES, FEATURES[:5], 1.0),
        r"text_features.*each row of image_features.*\(5, 4\)",
    ),
    "width": (lambda: wbj.clip_loss(FEATURES, FEATURES[:, :3], 1.0), r"same feature size, got \(6, 4\) and \(6, 3\)"),
    "not a matrix": (lambda: wbj.clip_loss(FEATURES[0], FEATURES, 1.0), r"image_features must have shape.*got \(4,\)"),
    "no rows": (lambda: wbj.clip_loss(FEATURES[:0], FEATURES[:0], 1.0), r"neither of them 0; got \(0, 4\)"),
    "dtype": (lambda: wbj.clip_loss(FEATURES, FEATURES.astype(jnp.bfloat16), 1.0), "same dtype, got.*bfloat16"),
    "integers": (lambda: wbj.clip_loss(FEATURES.astype(int), FEATURES.astype(int), 1.0), "floating point, got int"),
    "scale": (lambda: wbj.clip_loss(FEATURES, FEATURES, jnp.ones(3)), r"logit_scale must be a number.*\(3,\)"),
    "ids": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, ids=jnp.ones(6)), "ids must be integers, got float"),
    "ids of others": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, ids=jnp.arange(5)),
        r"ids must have one row.*\(5,\)",
    ),
    "ids, a matrix": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, ids=jnp.ones((6, 1), int)),
        r"shape \(rows,\), got",
    ),
    "equal_ids": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, equal_ids="kept"),
        "'positive', 'excluded'; got 'kept'",
    ),
    "smoothing": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, label_smoothing=2.0), r"within \[0, 1\].*got 2.0"),
    "reduction": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, reduction="max"), "'none'; got 'max'"),
    "exchange": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, exchange="root"), "'ring'; got 'root'"),
    "tile": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, tile=0), "tile must be an integer >= 1, got 0"),
    "memory": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, memory=-1), "'flat' or a number of bytes >= 0, got -1"),
    "temperature": (
        lambda: wbj.nt_xent_loss(FEATURES, FEATURES, temperature=0.0),
        "temperature must be positive, got 0.0",
    ),
    "temperature, an array": (
        lambda: wbj.sup_con_loss(FEATURES, jnp.zeros(6, int), temperature=np.float32(-1)),
        "temperature must be positive, got -1",
    ),
    "labels": (lambda: wbj.sup_con_loss(FEATURES, jnp.ones(6)), "labels must be integers, got float"),
    "keys": (lambda: wbj.info_nce_loss(FEATURES, FEATURES[:5], logit_scale=1.0), "at least as many rows.*5 and 6"),
    "hard negatives": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, hard_negatives=FEATURES),
        r"hard_negatives must have shape \(6, h, 4\), got \(6, 4\)",
    ),
    "ids of nothing": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, negative_ids=jnp.arange(2)),
        "negative_ids were given without negatives",
    ),
    "ids with nothing to be compared with": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, negatives=FEATURES, negative_ids=jnp.arange(6)),
        "negative_ids have nothing to be compared with",
    ),
    "direction": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, directions="key_to_key"),
        "'key_to_query'; got 'key_to_key'",
    ),
    "sample": (
        lambda: wbj.partial_fc_loss(FEATURES, jnp.zeros(6, int), FEATURES, sample_rate=0.5),
        "sample_rate=0.5 needs key=",
    ),
    "margin": (lambda: wbj.ArcFace(s=0.0), "s must be a positive number, got 0.0"),
    "chunks": (lambda: wbj.chunked(encoder), "one of chunk_size and num_chunks"),
    "chunks of a mesh": (
        lambda: wbj.chunked(encoder, chunk_size=2, mesh=mesh_of(2), axis="batch")({}, FEATURES),
        "'batch'; the mesh has 'data'",
    ),
    "rows of a batch": (
        lambda: wbj.chunked(encoder, chunk_size=2)({}, [FEATURES, FEATURES[:5]]),
        r"same number of rows.*\[\(5,\), \(6,\)\]",
    ),
    "uneven chunks": (lambda: wbj.tree_chunk(FEATURES, 4), "6 rows do not divide into 4 chunks"),
    "global arrays inside of a shard_map": (
        lambda: jax.shard_map(
            lambda x: wbj.clip_loss(x, x, 1.0), mesh=mesh_of(2), in_specs=jax.P("data"), out_specs=jax.P()
        )(jax.device_put(FEATURES, jax.NamedSharding(mesh_of(2), jax.P("data")))),
        "inside of a jax.shard_map over 'data'.*`_local`",
    ),
    "the same with its mesh": (
        lambda: jax.shard_map(
            lambda x: wbj.clip_loss(x, x, 1.0, mesh=mesh_of(2)), mesh=mesh_of(2), in_specs=jax.P(), out_specs=jax.P()
        )(FEATURES),
        "inside of a jax.shard_map over 'data'.*`_local`",
    ),
    "split, without a mesh": (
        lambda: wbj.clip_loss(*[jax.device_put(FEATURES, jax.NamedSharding(mesh_of(2), jax.P("data")))] * 2, 1.0),
        "image_features is split over 'data', and no mesh is given: pass mesh=",
    ),
    "two axes of one name": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, mesh=mesh_of(2), axis=["data", "data"]),
        "'data', 'data'; the mesh has 'data'",
    ),
    "no mesh": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, mesh=jax.devices()), "mesh must be a jax.*got list"),
    "nothing": (lambda: wbj.clip_loss(FEATURES, None, 1.0), "text_features must be an array, got None"),
    "no labels": (lambda: wbj.sup_con_loss(FEATURES, None), "labels must be an array, got None"),
    "no scale": (lambda: wbj.clip_loss(FEATURES, FEATURES, None), "logit_scale must be a number.*got None"),
    "hard negatives' ids": (
        lambda: wbj.info_nce_loss(
            FEATURES,
            FEATURES,
            logit_scale=1.0,
            query_ids=jnp.arange(6),
            hard_negatives=FEATURES[:, None],
            hard_negative_ids=jnp.arange(6),
        ),
        r"hard_negative_ids must have one id for each of hard_negatives, \(6, 1\); got \(6,\)",
    ),
    "a margin of torch": (
        lambda: wbj.partial_fc_loss(FEATURES, jnp.zeros(6, int), FEATURES, margin=wb.ArcFace()),
        "margin must be such as wholebatch.jax.ArcFace",
    ),
    "no key": (
        lambda: wbj.partial_fc_loss(FEATURES, jnp.zeros(6, int), FEATURES, sample_rate=0.5, key=5),
        "one key of jax.random.key",
    ),
    "an encoder that loses rows": (
        lambda: wbj.chunked(lambda _, x: x[0], chunk_size=2)({}, FEATURES),
        r"a row for each of 2 examples, got \(4,\)",
    ),
    "axis_name": (
        lambda: local_loss(FEATURES, FEATURES, 1.0),
        "axis_name must name an axis.*got 'data'.*without `_local`",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_met_while_tracing(name):
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


def test_ids_that_jax_would_cut_off():
    with jax.enable_x64(False):
        for ids in (np.arange(6) * 2**32, [2**31] * 6):
            with pytest.raises(ValueError, match=r"ids must fit into int32.*number them anew"):
                wbj.clip_loss(np.eye(6), np.eye(6), 1.0, ids=ids)


def test_a_temperature_that_is_not_known_is_traced():
    assert jax.eval_shape(lambda t: wbj.nt_xent_loss(FEATURES, FEATURES, temperature=t), 0.1).shape == ()
