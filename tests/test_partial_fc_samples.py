"""Samples of a head: read from all centers tile by tile, with the gradient of a copy and without its memory."""

import math

import pytest
import torch
from compare import assert_same
from live_bytes import peak_of

import wholebatch as wb

CLASSES, D = 60, 8
FORMS = [
    {},
    {"sub_centers": 2},
    {"sub_centers": 3, "normalize": "centers", "bias": True},
    {"normalize": "none", "bias": True, "label_smoothing": 0.1},
    {"normalize": "embeddings", "unbiased": True},
    {"margin": wb.CosFace(8.0, 0.2), "exclude_above": 0.2},
    {"margin_grad": "straight_through", "reduction": "none"},
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def batch(dtype, rows=6):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def made(dtype, form, rate=0.3):
    settings = {"margin": wb.ArcFace(8.0, 0.3)} | form
    head = wb.PartialFC(D, CLASSES, sample_rate=rate, dtype=dtype, **settings)
    if head.bias is not None:
        with torch.no_grad():
            head.bias.copy_(torch.arange(CLASSES) / CLASSES)
    return head


def of_copies(head, x, labels, index, form):
    """Return loss and gradients of the dense float64 reference on a copy of the sample's centers."""
    centers, y = (z.detach().double().requires_grad_() for z in (head.weight[index], x))
    bias = None if head.bias is None else head.bias[index].detach().double().requires_grad_()
    log_weights = None
    if form.get("unbiased"):
        log_weights = torch.zeros(len(index), dtype=torch.float64)
        log_weights[~torch.isin(index, labels)] = -math.log(head.sample_rate)
    given = {name: form[name] for name in form if name not in ("sub_centers", "bias", "unbiased")}
    loss = wb.reference.partial_fc_loss(
        y,
        labels,
        centers,
        **({"margin": wb.ArcFace(8.0, 0.3)} | given),
        class_ids=index,
        bias=bias,
        log_weights=log_weights,
    )
    loss.sum().backward()
    return loss.detach(), y.grad, centers.grad, None if bias is None else bias.grad


@pytest.mark.parametrize("memory", ["flat", 2048])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_sample_has_the_gradient_of_a_copy(form, dtype, memory):
    """With one tile, and with tiles smaller than the sample."""
    x, labels = batch(dtype)
    head = made(dtype, {**form, "memory": memory})
    loss = head(x, labels)
    loss.sum().backward()
    grad = head.weight.grad
    assert grad.is_sparse
    index = grad._indices()[0]
    assert torch.equal(index, index.unique())
    assert torch.isin(labels, index).all()
    assert len(labels) < len(index) < CLASSES
    found = [loss.detach(), x.grad, grad._values(), None if head.bias is None else head.bias.grad._values()]
    for ours, true in zip(found, of_copies(head, x, labels, index, form), strict=True):
        if true is not None:
            assert_same(ours, true, relative=TOLERANCES[dtype])
    assert (grad._values().flatten(1).abs().sum(1) > 0).sum() > len(labels), "negatives learn, too"


@pytest.mark.parametrize("length", [1e8, 1e10])
def test_a_sample_of_very_long_rows_has_the_gradient_of_a_copy(length):
    """They are widened to float64, through which autograd takes no sparse gradient."""
    x, labels = batch(torch.float32)
    x = (length * x.detach()).requires_grad_()
    head = made(torch.float32, FORMS[0])
    loss = head(x, labels)
    loss.sum().backward()
    index = head.weight.grad._indices()[0]
    true = of_copies(head, x, labels, index, FORMS[0])
    for ours, theirs in zip(
        [loss.detach(), length * x.grad, head.weight.grad._values()], [true[0], length * true[1], true[2]], strict=True
    ):
        assert_same(ours, theirs, relative=1e-5)


def test_a_sample_without_classes_has_no_gradient():
    head = wb.PartialFC(D, CLASSES, sample_rate=0.0, sub_centers=2)
    x = torch.randn(3, D, requires_grad=True)
    with pytest.raises(ValueError, match="labels"):
        head(x, torch.full((3,), 1_000_000))
    head(x, torch.full((3,), -100)).backward()
    assert head.weight.grad._nnz() == 0
    assert not x.grad.any()
    optimizer = wb.SparseSGD(head.parameters(), 0.1, 0.9)
    before = head.weight.detach().clone()
    optimizer.step()
    assert torch.equal(head.weight, before)


def test_a_sample_is_not_copied():
    """A step holds the gradient of a sample's centers, and nothing else of its size; both would be twice as much."""
    head = wb.PartialFC(64, 100_000, sample_rate=0.4)
    optimizer = wb.SparseSGD(head.parameters(), 0.1, 0.9)
    x, labels = torch.randn(32, 64, requires_grad=True), torch.arange(32)

    def step():
        head(x, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    sample = 0.4 * head.weight.nbytes
    assert sample < peak_of(step) < 1.5 * sample


def test_centers_that_change_before_the_backward_pass_are_refused():
    """As with all classes: they are read again, and a gradient at other centers would be wrong."""
    x, labels = batch(torch.float32)
    head = made(torch.float32, {})
    loss = head(x, labels)
    with torch.no_grad():
        head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified inplace"):
        loss.backward()


def test_a_second_derivative_of_a_sample_raises():
    x, labels = batch(torch.float64)
    head = made(torch.float64, {})
    (grad,) = torch.autograd.grad(head(x, labels), x, create_graph=True)
    with pytest.raises(RuntimeError, match="its gradient has no gradient"):
        grad.square().sum().backward()
