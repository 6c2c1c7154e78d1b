"""Gradient caching raises, on all ranks, if a step would be silently wrong or a setting is not valid."""

import copy
import pickle
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from gradcache_models import OUT, D, LateMaximum, assert_all_same, batch, good_loss, gradients_of, mlp
from torch import nn

import wholebatch as wb
from wholebatch.testing import run_ranks


@pytest.mark.parametrize("keep", [1.0, "auto"])
def test_overwritten_tensors_of_kept_graphs_raise(keep):
    model, (x, y) = nn.Sequential(nn.Linear(D, 8), LateMaximum(copied=False), nn.Linear(8, OUT)).double(), batch(8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wb.GradCache([model, model], 2, good_loss, keep_graphs=keep)(x, 10 * y)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("keep", [0, 1.0])
def test_scalars_that_differ_between_chunks_raise(keep):
    model, (x, y) = mlp(0), batch(8)

    def encode(z):
        found = model(z)
        return found, found.square().mean()

    step = wb.GradCache([encode, model], 2, lambda a, b: good_loss(a[0], b) + a[1], keep_graphs=keep)
    with pytest.raises(ValueError, match=r"representation 1 of model 0 .* must be the same in every chunk"):
        step(x, y)


@pytest.mark.parametrize("keep", [0, 1, 1.0])
def test_one_model_may_return_other_representations_for_each_input(keep):
    inner = mlp(0)
    scale, bias = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (3.0, 0.5))

    class Found(NamedTuple):
        z: torch.Tensor
        bias: torch.Tensor

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale, self.bias = inner, scale, bias

        def forward(self, z, text=False):
            return Found(self.inner(z), self.bias) if text else (self.inner(z), self.scale, self.bias)

    def loss_fn(image, text):
        return wb.functional.siglip_loss(image[0], text.z, image[1], image[2] + 2 * text.bias)

    model, (x, y) = Model(), batch(7)
    loss_fn(model(x), model(y, text=True)).backward()
    true = gradients_of(model)
    wb.GradCache([model, model], 3, loss_fn, keep_graphs=keep)([x], ([y], {"text": True}))
    assert_all_same(gradients_of(model), true)


def test_a_scale_of_shape_1_names_the_shape_of_one_number():
    inner, scale, (x, y) = mlp(0), nn.Parameter(torch.ones(1, dtype=torch.float64)), batch(6)
    step = wb.GradCache([lambda a, b: (inner(a), inner(b), scale)], 3, lambda z: wb.functional.clip_loss(*z))
    message = r"got 3 rows and returned 1 as representation 2: .*; one number for the whole batch, .* has shape \(\)"
    with pytest.raises(ValueError, match=message):
        step([x, y])


def test_some_representations_may_be_frozen():
    """A frozen tower and a fixed scale are allowed beside trained parts."""
    model, frozen, (x, y) = mlp(0), mlp(1).requires_grad_(False), batch(6)
    scale = torch.tensor(2.0, dtype=torch.float64)

    def encode(a, b):
        return frozen(a), model(b), scale

    def loss_fn(found):
        return wb.functional.clip_loss(*found)

    loss_fn(encode(x, y)).backward()
    true = gradients_of(model)
    wb.GradCache([encode], 2, loss_fn)([x, y])
    assert_all_same(gradients_of(model), true)


def test_hooks_graphs_and_wrong_splits_are_refused():
    model, (x, y) = mlp(0), batch(6)
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="has a hook for when its gradient is accumulated"):
        wb.GradCache([model, model], 2, good_loss)(x, y)
    hook.remove()
    wb.GradCache([model, model], 2, good_loss)(x, y)
    with pytest.raises(ValueError, match=r"the input of model 1 .* has a graph"):
        wb.GradCache([model, nn.Linear(8, OUT).double()], 2, good_loss)(x, nn.Linear(D, 8).double()(y))
    with pytest.raises(ValueError, match="a list of 6 things that are no tensors"):
        wb.GradCache([lambda z, names: model(z), model], 2, good_loss)([x, ["name"] * 6], y)
    with pytest.raises(
        ValueError, match=r"has 6 rows, its chunks have \[2, 2\]: split_input_fn must give all of them, once"
    ):
        wb.GradCache([model, model], 2, good_loss, lambda z, size: [z[:size], z[size : 2 * size]])(x, y)


def test_a_second_pass_of_another_shape_raises():
    model, calls, (x, y) = mlp(0), [0], batch(6)

    def encode(z):
        calls[0] += 1
        found = model(z)
        return found if calls[0] < 4 else (found, found)

    with pytest.raises(RuntimeError, match=r"gave shapes \[\(2, 4\), \(2, 4\)\], and the first \[\(2, 4\)\]"):
        wb.GradCache([encode, mlp(1)], 2, good_loss)(x, y)
    assert all(p.grad is None for p in model.parameters())


def good_step(model, x, y):
    return wb.GradCache([model, model], 2, good_loss)(x, y)


MISTAKES = {
    "one input too few": (lambda m, x, y: wb.GradCache([m, m], 2, good_loss)(x), "one input for each of the 2 models"),
    "rows disagree": (
        lambda m, x, y: wb.GradCache([lambda a, b: m(a)], 2, good_loss)([x, y[:3]]),
        r"must have the rows of the batch, got \[6, 3\] rows",
    ),
    "images": (
        lambda m, x, y: wb.GradCache([m], 2, good_loss)({"input_ids": x, "pixel_values": torch.zeros(16, 4)}),
        r"must have the rows of the batch, got \[6, 16\] rows; images: pass .*MultimodalSplit\(image_token_id=",
    ),
    "no tensor": (lambda m, x, y: wb.GradCache([m, m], 2, good_loss)("text", y), "takes a split_input_fn"),
    "other rows": (
        lambda m, x, y: wb.GradCache([lambda z: m(z)[:1], m], 2, good_loss)(x, y),
        "got 2 rows and returned 1 as representation 0",
    ),
    "no gradient": (lambda m, x, y: wb.GradCache([m, lambda z: m(z).detach()], 2, good_loss)(x, y), "has no gradient"),
    "model output": (
        lambda m, x, y: wb.GradCache([lambda z: SimpleNamespace(pooled=m(z)), m], 2, good_loss)(x, y),
        "must return a tensor, or a tuple of tensors, got SimpleNamespace; get_rep_fn=",
    ),
    "other lengths": (
        lambda m, x, y: wb.GradCache([lambda z: (m(z), m(z)[:, : 1 + int(z[0, 0] != x[0, 0])]), m], 2, good_loss)(x, y),
        r"representation 1 of model 0 \(function\) must have the same shape in all chunks.* pad to one length",
    ),
    "vector": (lambda m, x, y: wb.GradCache([m, m], 2, lambda a, b: a - b)(x, y), r"one element, got shape \(6, 4\)"),
    "number": (lambda m, x, y: wb.GradCache([m, m], 2, lambda a, b: 1.0)(x, y), "must return a tensor of one element"),
    "ignored": (
        lambda m, x, y: wb.GradCache([m, m], 2, lambda a, b: a.sum())(x, y),
        "does not depend on representation 0 of model 1",
    ),
    "detached": (
        lambda m, x, y: wb.GradCache([m, m], 2, lambda a, b: (a - b).detach().sum())(x, y),
        "the loss has no gradient",
    ),
}


def mistakes_body():
    """Mistakes on the last rank alone raise on all; gradients stay as they were, and the next step is right."""
    model, (x, y) = mlp(0), batch(6)
    rank, world = dist.get_rank() if dist.is_initialized() else 0, dist.get_world_size() if dist.is_initialized() else 1
    for name, (call, message) in MISTAKES.items():
        for accumulated in (False, True):
            for p in model.parameters():
                p.grad = torch.ones_like(p) if accumulated else None
            made = call if rank == world - 1 else good_step
            with pytest.raises(ValueError, match=message):
                made(model, x, y)
            for p in model.parameters():
                assert torch.equal(p.grad, torch.ones_like(p)) if accumulated else p.grad is None, name
        assert good_step(model, x, y).isfinite()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wrong_call_on_one_rank_raises_on_all_ranks(world_size):
    run_ranks(mistakes_body, world_size, timeout_s=60)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_model_with_a_hidden_state_raises(accumulated):
    """The error comes in the second chunk's second pass: the first chunk's gradient exists by then, and is removed."""
    inner, calls, (x, y) = mlp(0), [0], batch(6)

    def encode(z):
        calls[0] += 1
        return inner(z) * (1 if calls[0] < 4 else 1.01)

    for p in inner.parameters():
        p.grad = torch.ones_like(p) if accumulated else None
    with pytest.raises(RuntimeError, match="gave another representation 0 than the first"):
        wb.GradCache([encode, inner], 3, good_loss)(x, y)
    for p in inner.parameters():
        assert torch.equal(p.grad, torch.ones_like(p)) if accumulated else p.grad is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_sizes": 0}, "chunk_sizes must be a positive integer, rows of a chunk .or a TokenBudget.; got 0"),
        ({"chunk_sizes": 2.0}, "chunk_sizes"),
        ({"chunk_sizes": True}, "chunk_sizes must be a positive integer"),
        ({"chunk_sizes": [1, 2, 3]}, r"one for each of the 2 models; got \[1, 2, 3\]"),
        ({"models": nn.Linear(2, 2)}, "models must be a list"),
        ({"models": []}, "models must be a list"),
        ({"loss_fn": None}, "loss_fn must be callable, got NoneType"),
        ({"get_rep_fn": "pooled"}, "get_rep_fn must be callable, got str"),
        ({"fp16": True}, "fp16=True needs a scaler"),
        ({"keep_graphs": -1}, "keep_graphs must be a number of chunks"),
        ({"keep_graphs": 1.5}, "keep_graphs must be a number of chunks"),
        ({"keep_graphs": "all"}, "keep_graphs must be .* or 'auto'; got 'all'"),
        ({"memory_budget": 10}, "memory_budget is a number of bytes for keep_graphs='auto'"),
    ],
)
def test_a_wrong_setting_is_refused_by_the_constructor(arguments, message):
    given = {"models": [nn.Linear(2, 2)] * 2, "chunk_sizes": 2, "loss_fn": good_loss} | arguments
    with pytest.raises(ValueError, match=message):
        wb.GradCache(**given)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_step_needs_gradients(context):
    """In an evaluation, a step would leave gradients in `.grad`."""
    model = torch.nn.Linear(3, 2)
    step = wb.GradCache([model, model], 2, lambda x, y: wb.functional.clip_loss(x, y, 1.0))
    with context(), pytest.raises(ValueError, match=r"must not be under torch\.no_grad\(\) or inference_mode"):
        step(torch.randn(4, 3), torch.randn(4, 3))
    assert model.weight.grad is None


def no_grad_on_one_rank_body():
    model = torch.nn.Linear(3, 2)
    step = wb.GradCache([model, model], 2, lambda x, y: wb.functional.clip_loss(x, y, 1.0))
    x = torch.randn(4, 3)
    with torch.set_grad_enabled(dist.get_rank() == 0), pytest.raises(ValueError, match=r"rank 1: a step of GradCache"):
        step(x, x)
    assert model.weight.grad is None
    return step(x, x).item()


def test_a_step_needs_gradients_on_all_ranks():
    assert len({*run_ranks(no_grad_on_one_rank_body, 2)}) == 1


def test_the_loss_of_a_finished_step_says_that_backward_is_done(tmp_path):
    """It is a plain tensor in every other use: numbers, sums, logs, copies, files, another loss beside it."""
    model, (x, y) = mlp(0), batch(8)
    step = wb.GradCache([model, model], 4, good_loss)
    loss = step(x, y)
    before = gradients_of(model)
    message = "GradCache has made the backward pass: .* Leave backward.. out; .* pass deferred=True to GradCache"
    with pytest.raises(ValueError, match=message):
        loss.backward()
    with pytest.raises(ValueError, match=message):
        loss.backward(retain_graph=True)
    assert all(p.grad is None for p in model.parameters())
    assert (type(loss), loss.requires_grad, loss.grad_fn) == (torch.Tensor, False, None)
    assert loss == loss.item() == float(loss) == loss.numpy() == torch.stack([loss, loss]).mean()
    assert f"{loss:.3f} {loss}" == f"{loss.item():.3f} {loss.detach()}"
    torch.save({"loss": loss}, tmp_path / "loss.pt")
    copies = torch.load(tmp_path / "loss.pt")["loss"], copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))
    assert all(torch.equal(x, loss) for x in copies)
    (loss + model[0].weight.square().sum()).backward()  # the other loss has a gradient
    assert model[0].weight.grad is not None
    loss /= 2
    gone = weakref.ref(loss)
    del loss
    assert gone() is None
    assert len(before) == 4


def backward_twice_body():
    model, (x, y) = mlp(0), batch(8)
    ddp = nn.parallel.DistributedDataParallel(model)
    loss = wb.GradCache([ddp, ddp], 4, good_loss)(x, y)
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="GradCache has made the backward pass"):
        loss.backward()
    dist.all_reduce(loss)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_a_second_backward_pass_raises_on_all_ranks():
    run_ranks(backward_twice_body, 2, timeout_s=60)
