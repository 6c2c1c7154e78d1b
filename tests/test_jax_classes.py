"""PartialFC on JAX: classes that are split over devices equal the dense reference and PyTorch."""

import numpy as np
import pytest
import torch

import wholebatch as wb

jax = pytest.importorskip("jax")  # JAX needs Python 3.11
import jax.numpy as jnp  # noqa: E402
from jax_cases import as_jax, assert_close, mesh_of, settings_of  # noqa: E402

import wholebatch.jax as wbj  # noqa: E402
from wholebatch.jax.partial_fc import sampled  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64")

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


@pytest.mark.parametrize(("name", "devices", "kind", "exchange"), settings_of(list(MARGINS), ["arcface"]))
def test_partial_fc(name, devices, kind, exchange):
    """13 examples and 11 classes do not divide by any number of devices; some of eight devices have no class."""
    (margin, of_torch), (x, labels, w, weights), mesh = MARGINS[name], classes(), mesh_of(devices, kind)
    tiles = {} if kind == "auto" and devices == 2 else {"tile": 3, "memory": "flat"}

    def loss(x, w, weights):
        return wbj.partial_fc_loss(
            x, as_jax(labels), w, margin=margin, weights=weights, mesh=mesh, exchange=exchange, **tiles
        )

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*map(as_jax, (x, w, weights)))
    found = [np.asarray(z) for z in (value, *gradients)]
    for function in (wb.reference.partial_fc_loss, wb.functional.partial_fc_loss):
        assert_close(found, by_torch_classes(function, x, labels, w, weights, margin=of_torch))


@pytest.mark.parametrize("name", MARGINS)
def test_dense_references_of_both_libraries_are_the_same(name):
    (margin, of_torch), (x, labels, w, weights) = MARGINS[name], classes()

    def loss(x, w, weights):
        return wbj.reference.partial_fc_loss(x, as_jax(labels), w, margin=margin, weights=weights)

    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(*map(as_jax, (x, w, weights)))
    expected = by_torch_classes(wb.reference.partial_fc_loss, x, labels, w, weights, margin=of_torch)
    assert_close([np.asarray(z) for z in (value, *gradients)], expected)
    with_a_wrong_label = as_jax(labels).at[0].set(len(w))
    traced = jax.jit(lambda labels: wbj.reference.partial_fc_loss(as_jax(x), labels, as_jax(w), margin=margin))
    assert np.isnan(traced(with_a_wrong_label)), "one whose value is known is an error"


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_the_local_function_is_the_same_loss(exchange):
    x, labels, w, weights = classes(rows=12, num=8)

    def local(x, labels, w, weights):
        return wbj.partial_fc_loss_local(x, labels, w, weights=weights, axis_name="data", exchange=exchange, tile=2)

    loss = jax.shard_map(local, mesh=mesh_of(4, "auto"), in_specs=jax.P("data"), out_specs=jax.P())
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 2, 3)))(*map(as_jax, (x, labels, w, weights)))
    expected = by_torch_classes(wb.reference.partial_fc_loss, x, labels, w, weights, margin=wb.ArcFace())
    assert_close([np.asarray(z) for z in (value, *gradients)], expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_summed_in_float32(dtype):
    x, labels, w, _ = classes(rows=32, num=40, d=32)
    arrays = [as_jax(z).astype(dtype) for z in (x, w)]
    exact = [torch.from_numpy(np.array(z.astype(float))) for z in arrays]
    expected = by_torch_classes(
        wb.reference.partial_fc_loss, exact[0], labels, exact[1], torch.ones(32, dtype=float), margin=wb.ArcFace(16.0)
    )

    def loss(x, w):
        return wbj.partial_fc_loss(x, as_jax(labels), w, margin=wbj.ArcFace(16.0), mesh=mesh_of(4, "auto"), tile=8)

    value, gradients = jax.value_and_grad(loss, (0, 1))(*arrays)
    assert value.dtype == jnp.float32
    found = [np.asarray(z.astype(float)) for z in (value, *gradients)]
    assert_close(found, expected[:3], 1e-2, 1e-2)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_a_sample_of_classes(exchange):
    """A sample is the same on any number of devices and has the batch's classes; its loss and gradient are exact."""
    x, labels, w, weights = classes(rows=9, num=64)
    key, rate = jax.random.key(5), 0.3
    in_sample = np.asarray(sampled(key, jnp.arange(64), rate))
    assert 8 < in_sample.sum() < 32
    ids = torch.from_numpy(np.flatnonzero(in_sample))
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


def test_embeddings_that_lie_on_their_centers():
    """At theta = 0 the margin's derivative with respect to the cosine is infinite."""
    x = jnp.eye(3, 4)
    value, gradient = jax.value_and_grad(lambda x: wbj.partial_fc_loss(x, jnp.arange(3), jnp.eye(3, 4)))(x)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_a_label_of_no_class_is_an_error_or_nan():
    x = jnp.eye(3, 4)
    loss = jax.jit(wbj.partial_fc_loss)
    for label in (3, -1):
        assert np.isnan(loss(x, jnp.array([0, 1, label]), x))
        with pytest.raises(ValueError, match=rf"labels must lie in \[0, 3\), or be ignore_index; got {label}"):
            wbj.partial_fc_loss(x, jnp.array([0, 1, label]), x)
        with pytest.raises(ValueError, match=rf"labels must lie in \[0, 3\), or be ignore_index; got {label}"):
            wbj.reference.partial_fc_loss(x, jnp.array([0, 1, label]), x)
    assert np.isfinite(loss(x, jnp.array([0, 1, -100]), x))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_an_ignored_label_that_no_label_can_be_leaves_no_row_out(dtype):
    """Narrowed to the labels' dtype, 2^32 would be class 0."""
    x, labels = jnp.eye(4, 6) + 0.1, jnp.array([0, 1, 2, 0], dtype)
    every_row = wbj.partial_fc_loss(x, labels, x)
    assert every_row > 1
    assert wbj.partial_fc_loss(x, labels, x, ignore_index=2**32) == every_row


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint32])
def test_labels_of_any_integer_dtype(dtype):
    """Some dtypes hold neither ignore_index nor the number of classes."""
    x, labels, w, _ = classes(num=300)
    labels = labels.clamp(min=0) % 128
    expected = wb.reference.partial_fc_loss(x, labels, w, margin=wb.ArcFace())
    for settings in ({}, {"mesh": mesh_of(4, "auto"), "exchange": "ring"}):
        found = wbj.partial_fc_loss(as_jax(x), labels.numpy().astype(dtype), as_jax(w), **settings)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
