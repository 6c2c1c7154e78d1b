"""The losses of wholebatch.jax equal the dense reference and PyTorch, on one to eight devices simulated by the CPU."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loss_cases import BIAS, whole_batch

import wholebatch as wb

jax = pytest.importorskip("jax")  # JAX needs Python 3.11
import jax.numpy as jnp  # noqa: E402
from jax_cases import (  # noqa: E402
    CASES,
    EVERYTHING,
    SCALE,
    as_jax,
    as_module,
    assert_close,
    by_reference,
    by_torch,
    compiled,
    local_loss,
    mesh_of,
    settings_of,
    shards,
    values_and_gradients,
)

import wholebatch.jax as wbj  # noqa: E402
from wholebatch.jax import options  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64")

CORE = [name for name in CASES if name in ("clip", "info_nce", "nt_xent", "siglip", "sup_con")]


def check_parity(name, rows, mesh, exchange):
    case = CASES[name]
    inputs = shards(case, rows, 4)
    found = values_and_gradients(case, inputs, SCALE, BIAS, mesh=mesh, exchange=exchange, tile=3, memory="flat")
    assert_close(found, by_reference(case, inputs, SCALE, BIAS))
    assert_close(found, by_torch(wb.functional, case, inputs, SCALE, BIAS))


@pytest.mark.parametrize(("name", "devices", "kind", "exchange"), settings_of(list(CASES), CORE))
def test_losses_equal_the_dense_reference_on_any_devices(name, devices, kind, exchange):
    """Rows may or may not divide by the number of devices: with 5 rows, some of eight devices have none."""
    rows = 16 if (kind == "explicit") == (devices % 4 == 0) else 5
    check_parity(name, rows, mesh_of(devices, kind), exchange)


@pytest.mark.parametrize("name", CASES)
def test_dense_references_of_both_libraries_are_the_same(name):
    """JAX's reference implementations need no torch."""
    case = CASES[name]
    inputs = shards(case, 7, 4)
    found = values_and_gradients(case, inputs, SCALE, BIAS, functions=as_module(wbj.reference))
    assert_close(found, by_reference(case, inputs, SCALE, BIAS))


@pytest.mark.parametrize("name", ["nt_xent", "sup_con"])
def test_rows_of_zeros_and_tiny_ones(name):
    """The losses and the reference divide by at least 1e-12, as PyTorch's normalize does."""
    case = CASES[name]
    inputs = shards(case, 6, 2)
    inputs[0][2], inputs[0][3] = 0, inputs[0][3] * 1e-14
    expected = by_reference(case, inputs, SCALE, BIAS)
    for settings in ({"functions": as_module(wbj.reference)}, {"mesh": mesh_of(2, "auto"), "tile": 2}):
        assert_close(values_and_gradients(case, inputs, SCALE, BIAS, **settings), expected)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("name", ["clip", "nt_xent", "sup_con"])
def test_parity_on_three_devices(name, exchange):
    """With an odd number of devices no two share a block of a symmetric S."""
    check_parity(name, 7, mesh_of(3, "auto"), exchange)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("name", ["clip, label smoothing", "info_nce, few negatives", "nt_xent", "sup_con"])
def test_kept_products(name, exchange):
    """Keep the products of some tiles, or of all; a tile has 3 x 3 numbers of 8 bytes."""
    case = CASES[name]
    inputs = shards(case, 24, 4)
    some, whole = 5 * 72, 10**6
    for memory in (some, whole) if EVERYTHING else (some if (exchange == "ring") == name.startswith("c") else whole,):
        settings = {"mesh": mesh_of(4, "auto"), "exchange": exchange, "tile": 3, "memory": memory}
        assert_close(
            values_and_gradients(case, inputs, SCALE, BIAS, **settings), by_reference(case, inputs, SCALE, BIAS)
        )


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("name", CORE)
def test_memory_auto(monkeypatch, name, devices, exchange):
    """By default S is computed in one piece while it fits into the memory, and in large tiles otherwise."""
    if devices == 1 and exchange == "ring":
        return
    case = CASES[name]
    inputs = shards(case, 24, 4)
    for memory in (2**30, 24 * 24 * 2):  # the latter has room for half of the entries
        monkeypatch.setattr(options, "_AUTO_BYTES", memory)
        monkeypatch.setattr(options, "_FLAT_TILE", 2)
        settings = {"mesh": mesh_of(devices, "auto"), "exchange": exchange}
        assert_close(
            values_and_gradients(case, inputs, SCALE, BIAS, **settings), by_reference(case, inputs, SCALE, BIAS)
        )


@pytest.mark.parametrize("memory", ["flat", 10**6])
def test_the_exchange_is_chosen_once(monkeypatch, memory):
    """The backward pass, which moves more bytes, must have the exchange and the kept products of the forward pass."""
    case = CASES["clip"]
    for rows, room, messages in ((20, 0, "all-gather"), (28, 1, "collective-permute")):
        inputs = shards(case, rows, 4)
        monkeypatch.setattr(options, "_GATHER_BYTES", 3 * inputs[1].nbytes - room)
        settings = {"mesh": mesh_of(4, "auto"), "tile": 3, "memory": memory}
        assert_close(
            values_and_gradients(case, inputs, SCALE, BIAS, **settings), by_reference(case, inputs, SCALE, BIAS)
        )
        loss = partial(wbj.clip_loss, logit_scale=SCALE, **settings)
        split = jax.NamedSharding(mesh_of(4, "auto"), jax.P("data"))
        text = compiled(loss, *(jax.device_put(as_jax(x), split) for x in inputs)).as_text()
        assert [kind for kind in ("all-gather", "collective-permute") if f" {kind}(" in text] == [messages]


# Inside the caller's shard_map.


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
    chosen = [as_jax(inputs[at]) for at in case.differentiable]

    def of_differentiated(chosen, scale, bias):
        given = [as_jax(x) for x in inputs]
        for at, x in zip(case.differentiable, chosen, strict=True):
            given[at] = x
        return by_rows(given, scale, bias)

    value, (of_inputs, *of_scalars) = jax.jit(jax.value_and_grad(of_differentiated, (0, 1, 2)))(chosen, SCALE, BIAS)
    of_scalars = [x for x, there_is in zip(of_scalars, (case.has_scale, case.has_bias), strict=True) if there_is]
    assert_close([np.asarray(x) for x in (value, *of_inputs, *of_scalars)], by_reference(case, inputs, SCALE, BIAS))


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
        assert_close([np.asarray(z) for z in (value, *gradients)], by_reference(case, inputs, SCALE, BIAS))


@pytest.mark.planted
def test_without_vma_checks_gradients_are_off_by_the_number_of_devices():
    """Gradients of sums over devices are W times too large inside; custom derivatives are too small by W outside.

    So the functions for a device's rows raise there.
    """
    mesh, x = mesh_of(4, "auto"), jnp.eye(8)
    split = {"mesh": mesh, "in_specs": (jax.P("data"),), "out_specs": jax.P()}

    def by_hand(x):
        return jax.lax.psum((x**2).sum(), "data")

    local = jax.custom_vjp(by_hand)
    local.defvjp(lambda x: (by_hand(x), x), lambda x, cotangent: (2 * x * cotangent,))
    for unchecked in ({}, {"check_vma": False}):
        inside = jax.shard_map(jax.grad(by_hand), **split | {"out_specs": jax.P("data")}, **unchecked)(x)
        np.testing.assert_allclose(inside, 2 * x * (4 if unchecked else 1))
        outside = jax.grad(jax.shard_map(local, **split, **unchecked))(x)
        np.testing.assert_allclose(outside, 2 * x / (4 if unchecked else 1))
    with pytest.raises(ValueError, match=r"image_features must vary over axis_name='data'.*leave check_vma at True"):
        jax.shard_map(lambda x: local_loss(x, x, 1.0), **split, check_vma=False)(x)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_two_axes_act_as_one(exchange):
    case = CASES["clip"]
    inputs = shards(case, 12, 8)
    found = values_and_gradients(
        case, inputs, SCALE, BIAS, mesh=mesh_of(8, "auto", ("data", "fsdp")), axis=("data", "fsdp"), exchange=exchange
    )
    assert_close(found, by_reference(case, inputs, SCALE, BIAS))


@pytest.mark.parametrize("rows", [12, 7])
def test_a_mesh_with_another_axis(rows):
    """Devices along the other axis have the same rows; the two axes may be of different kinds."""
    case = CASES["clip"]
    inputs = shards(case, rows, 4)
    auto, explicit = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    for kinds in product((auto, explicit), repeat=2):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds, devices=jax.devices())
        found = values_and_gradients(case, inputs, SCALE, BIAS, mesh=mesh)
        assert_close(found, by_reference(case, inputs, SCALE, BIAS))


def test_the_mesh_of_set_mesh():
    case = CASES["clip"]
    inputs = shards(case, 8, 4)
    with jax.set_mesh(mesh_of(4, "auto")):
        assert_close(values_and_gradients(case, inputs, SCALE, BIAS), by_reference(case, inputs, SCALE, BIAS))
        with pytest.raises(ValueError, match="axis must name axes of the mesh, got 'batch'; the mesh has 'data'"):
            values_and_gradients(case, inputs, SCALE, BIAS, axis="batch")


# JAX's transformations.


TURNS = [  # each loss by one exchange on one kind of axes, in turn, or by all
    (name, exchange, kind)
    for at, name in enumerate(CORE)
    for turn, (exchange, kind) in enumerate(product(("gather", "ring"), ("auto", "explicit")))
    if EVERYTHING or turn == at % 4
]


@pytest.mark.parametrize(("name", "exchange", "kind"), TURNS)
def test_vmap_over_temperatures(name, exchange, kind):
    case, scales = CASES[name], np.array([0.5, 10.0, 30.0])
    inputs = shards(case, 8, 4)
    functions, arrays = as_module(mesh=mesh_of(4, kind), exchange=exchange, tile=3), [as_jax(x) for x in inputs]

    def loss(scale):
        return case.call(functions, *arrays, scale, BIAS)

    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(loss)))(scales)
    for at, scale in enumerate(scales):
        expected = by_reference(case, inputs, scale, BIAS)
        assert_close([value[at], gradient[at]], [expected[0], expected[-2 if case.has_bias else -1]])


@pytest.mark.parametrize(("name", "exchange", "kind"), TURNS)
def test_losses_inside_jax_checkpoint_are_the_same(name, exchange, kind):
    case = CASES[name]
    inputs = shards(case, 8, 4)
    functions, arrays = as_module(mesh=mesh_of(4, kind), exchange=exchange, tile=3), [as_jax(x) for x in inputs]

    @jax.checkpoint
    def loss(x, scale):
        return case.call(functions, x, *arrays[1:], scale, BIAS)

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(arrays[0], SCALE)
    expected = by_reference(case, inputs, SCALE, BIAS)
    expected = [*expected[:2], expected[-2 if case.has_bias else -1]]
    assert_close([np.asarray(z) for z in (value, *gradients)], expected)


@pytest.mark.parametrize("name", ["clip, ids, weights", "nt_xent, ids, weights", "siglip, ids, weights", "sup_con"])
def test_sums_and_losses_of_rows_have_the_dense_gradient(name):
    """Compare the sum, and the losses of rows with a gradient for each of them."""
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


# Low precision and extreme scales.


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("name", ["clip", "nt_xent", "siglip", "info_nce, both directions, separate"])
def test_float32_at_any_scale(name, scale):
    case = CASES[name]
    inputs = shards(case, 16, 4)
    found = values_and_gradients(
        case, [z.float() if z.is_floating_point() else z for z in inputs], np.float32(scale), np.float32(BIAS),
        mesh=mesh_of(4), tile=3,
    )  # fmt: skip
    assert_close(
        found,
        by_reference(case, [z.float().double() for z in inputs], scale, BIAS),
        1e-6 * scale,
        2e-5 * max(1, scale / 100),
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, jnp.bfloat16) for name in CORE),
        *((name, jnp.float16) for name in ("clip", "info_nce, both directions, separate", "siglip")),
    ],
)
def test_half_precision_is_summed_in_float32(name, dtype):
    """The loss is compared with the reference on the rounded features; logits in half precision would be far worse."""
    case = CASES[name]
    half = torch.bfloat16 if dtype == jnp.bfloat16 else torch.float16
    inputs = whole_batch(case, (32,), d=64)
    rounded = [z.to(half).double() if z.is_floating_point() else z for z in inputs]
    expected = by_reference(case, rounded, 50.0, BIAS)
    arrays = [as_jax(z).astype(dtype) if z.is_floating_point() else as_jax(z) for z in rounded]
    functions, features = as_module(mesh=mesh_of(4, "auto"), tile=8), len(case.differentiable)
    assert list(case.differentiable) == list(range(features))

    def loss(features, scale):
        return case.call(functions, *features, *arrays[len(features) :], scale, jnp.float32(BIAS))

    value, (of_features, of_scale) = jax.jit(jax.value_and_grad(loss, (0, 1)))(arrays[:features], jnp.float32(50))
    assert value.dtype == jnp.float32
    assert {z.dtype for z in of_features} == {jnp.dtype(dtype)}
    found = [np.asarray(z.astype(jnp.float64)) for z in (value, *of_features, of_scale)]
    floor = 1e-5  # below this float16 has few bits left
    errors = [np.abs(a - b).max() / max(np.abs(b).max(), floor) for a, b in zip(found, expected, strict=False)]
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
    """The maximum of a column is not rounded when it is reduced: at a large scale its error would be the loss's."""
    x, y = whole_batch(CASES["clip"], (24,))
    arrays = [as_jax(z.float()) for z in (x, y)]
    loss = partial(wbj.clip_loss, *arrays, np.float32(12345), reduction="none")
    np.testing.assert_allclose(loss(mesh=mesh_of(devices), exchange="gather"), loss(), rtol=0, atol=2e-3)
    same = partial(wbj.clip_loss, arrays[0], arrays[0], np.float32(12345), reduction="none")
    assert np.asarray(same(mesh=mesh_of(devices), exchange="gather")).min() >= -1e-3


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_features_that_are_not_finite_make_the_loss_nan(exchange):
    """A row that is no row's positive, and enters only the sums, has the same effect."""
    x, n = (as_jax(z) for z in shards(CASES["clip"], 6, 2))
    labels = jnp.array([0, 0, 1, 1, 2, 3])  # the last row has no positive
    for wrong in (jnp.nan, jnp.inf):
        n = n.at[5, 0].set(wrong)
        settings = {"mesh": mesh_of(4, "auto"), "exchange": exchange}
        assert np.isnan(wbj.clip_loss(x, n, 1.0, **settings))
        assert np.isnan(wbj.info_nce_loss(x, x, logit_scale=1.0, negatives=n, **settings))
        assert np.isnan(wbj.sup_con_loss(n, labels, **settings))
        assert np.isnan(wbj.nt_xent_loss(x, n, **settings))
        assert np.isnan(wbj.partial_fc_loss(x, jnp.arange(6) % 5, n, **settings))
        assert not np.isfinite(wbj.siglip_loss(x, n, 1.0, 0.0, **settings))


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("views", [0, 2])
def test_rows_of_the_ignored_label_are_not_in_the_batch(views, exchange):
    x = np.random.default_rng(0).normal(size=(7, views, 5) if views else (7, 5))  # one row is padded on two devices
    labels = np.array([0, -1, 1, 0, -1, -1, 1])
    kept, settings = labels >= 0, {"mesh": mesh_of(2, "auto"), "exchange": exchange}
    reference = jax.jit(jax.value_and_grad(wbj.reference.sup_con_loss))
    expected, of_kept = reference(jnp.array(x[kept]), jnp.array(labels[kept]))

    def loss(x, **more):
        return wbj.sup_con_loss(x, labels, ignore_index=-1, **settings, **more)

    found, grad = jax.jit(jax.value_and_grad(loss))(jnp.array(x))
    assert np.allclose(found, expected)
    assert np.allclose(grad[kept], of_kept)
    assert not np.any(grad[~kept])
    each = np.asarray(loss(x, reduction="none"))
    assert not np.any(each[~kept])

    with_all_rows = jax.jit(wbj.reference.sup_con_loss, static_argnames=("ignore_index", "reduction"))
    assert np.allclose(with_all_rows(jnp.array(x), jnp.array(labels), ignore_index=-1), expected)
    assert np.allclose(with_all_rows(jnp.array(x), jnp.array(labels), ignore_index=-1, reduction="none"), each)


@pytest.mark.parametrize("loss", [wbj.sup_con_loss, wbj.reference.sup_con_loss])
def test_labels_of_no_class_are_refused(loss):
    x, labels = jnp.eye(4), jnp.array([0, 0, 1, -1])
    with pytest.raises(ValueError, match="labels must not be negative, got -1; name it as ignore_index="):
        loss(x, labels)
    assert np.isnan(jax.jit(loss)(x, labels))
    assert np.isfinite(jax.jit(loss)(x, jnp.array([0, 0, 1, 2])))


@pytest.mark.parametrize("loss", [wbj.sup_con_loss, wbj.reference.sup_con_loss])
def test_labels_in_a_byte_are_not_taken_for_negative_ones(loss):
    labels = np.array([0, 0, 255], np.uint8)
    assert np.allclose(loss(jnp.eye(3), labels, ignore_index=-1), np.log(2))
    assert np.allclose(loss(jnp.eye(3), labels, ignore_index=255), 0)


def test_the_float16_gradient_of_a_mean_does_not_overflow():
    """SigLIP computes the gradient of the sum in the forward pass, which exceeds float16's range."""
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(2048, 4)) + 4 for _ in "xy")
    x, y = (jnp.asarray(z / np.linalg.norm(z, axis=1, keepdims=True), jnp.float16) for z in (x, y))
    found = jax.grad(lambda x: wbj.siglip_loss(x, y, 100.0, 0.0))(x)
    exact = jax.grad(lambda x: wbj.reference.siglip_loss(x, y.astype(float), 100.0, 0.0))(x.astype(float))
    assert 2048 * np.abs(exact).max() > 65504
    np.testing.assert_allclose(found, exact, rtol=2e-3, atol=2e-3 * np.abs(exact).max())


# Plausible wrong answers are rejected.


@pytest.mark.planted
def test_wrong_recipes_are_rejected():
    case, mesh = CASES["clip"], mesh_of(4, "auto")
    inputs = shards(case, 12, 4)
    x, y = map(as_jax, inputs)
    expected = by_reference(case, inputs, SCALE, BIAS)

    def dense(x, y, scale):
        logits = scale * x @ y.T
        local = jnp.diagonal(logits)
        return ((jax.nn.logsumexp(logits, 1) - local).mean() + (jax.nn.logsumexp(logits, 0) - local).mean()) / 2

    def among_local_rows(x, y, scale):
        return jax.lax.pmean(dense(x, y, scale), "data")

    def without_a_gradient_of_others(x, y, scale):
        everyone = jax.lax.stop_gradient(jax.lax.all_gather(y, "data", tiled=True))
        logits = scale * x @ jax.lax.dynamic_update_slice_in_dim(everyone, y, jax.lax.axis_index("data") * len(y), 0).T
        local = scale * (x * y).sum(1)
        return jax.lax.pmean((jax.nn.logsumexp(logits, 1) - local).mean(), "data")

    split = {"mesh": mesh, "in_specs": (jax.P("data"), jax.P("data"), jax.P()), "out_specs": jax.P()}
    right = jax.value_and_grad(dense, (0, 1, 2))(x, y, SCALE)
    assert_close([np.asarray(z) for z in (right[0], *right[1])], expected)
    for wrong in (among_local_rows, without_a_gradient_of_others):
        found = jax.jit(jax.value_and_grad(jax.shard_map(wrong, **split), (0, 1, 2)))(x, y, SCALE)
        with pytest.raises(AssertionError):
            assert_close([np.asarray(z) for z in (found[0], *found[1])], expected, 1e-3, 1e-3)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int8])
def test_ids_of_any_integer_dtype(dtype):
    """An id of 0 is an ordinary id, even as the smallest of its dtype; negatives without ids match no query."""
    case = CASES["clip"]
    (x, y), ids = shards(case, 6, 2), np.array([0, 1, 2, 0, 1, 2])
    negatives = torch.randn(5, x.shape[1], dtype=torch.float64)
    expected = wb.reference.info_nce_loss(x, y, logit_scale=5.0, negatives=negatives, query_ids=torch.tensor(ids))
    for mesh in (None, mesh_of(4, "auto")):
        found = wbj.info_nce_loss(
            *map(as_jax, (x, y)), logit_scale=5.0, negatives=as_jax(negatives), query_ids=ids.astype(dtype), mesh=mesh
        )
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_keys_and_negatives_with_different_shardings():
    """On explicit axes, keys outnumber queries and are split; replicated negatives do not divide by the devices."""
    x, y = shards(CASES["clip"], 8, 4)
    keys, negatives = torch.cat([y, x[:4]]), torch.randn(3, x.shape[1], dtype=torch.float64)
    expected = wb.reference.info_nce_loss(x, keys, logit_scale=5.0, negatives=negatives)
    mesh = mesh_of(4, "explicit")
    split = [jax.device_put(as_jax(z), jax.NamedSharding(mesh, jax.P("data"))) for z in (x, keys)]
    found = partial(wbj.info_nce_loss, logit_scale=5.0, negatives=as_jax(negatives), mesh=mesh)
    np.testing.assert_allclose(found(*split), expected, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(found)(*split), expected, rtol=1e-12)
    key_ids = torch.arange(12) % 5
    of_ids = wb.reference.info_nce_loss(x, keys, logit_scale=5.0, negatives=negatives, key_ids=key_ids)
    split_ids = jax.device_put(as_jax(key_ids), jax.NamedSharding(mesh, jax.P("data")))
    np.testing.assert_allclose(found(*split, key_ids=split_ids), of_ids, rtol=1e-12)
