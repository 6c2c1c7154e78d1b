"""The backward pass of a deferred loss: one that never comes, comes twice, from elsewhere, or by mistake."""

import copy
import gc
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from gradcache_models import (
    Clip,
    TwoParts,
    assert_all_same,
    assert_all_times,
    batch,
    good_loss,
    gradients_of,
    mlp,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.gradcache.step import Step
from wholebatch.testing import run_ranks

SIZE = 2


def test_another_thread_may_go_backward():
    """As on CUDA, where autograd runs nodes in a thread of the device."""
    model, (x, y) = mlp(0, nn.Dropout(0.3)), batch(8)
    torch.manual_seed(1)
    wb.GradCache([model, model], 3, good_loss)(x, y)
    true = gradients_of(model)
    torch.manual_seed(1)
    loss = wb.GradCache([model, model], 3, good_loss, deferred=True)(x, y)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_all_same(gradients_of(model), true)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_loss_is_only_evaluated(context):
    calls, inner, (x, y) = [0], mlp(0, nn.Dropout(0.3)).eval(), batch(7)

    def model(z):
        calls[0] += 1
        return inner(z)

    expected = good_loss(inner(x), inner(y))
    with context():
        loss = wb.GradCache([model, model], 3, good_loss, deferred=True)(x, y)
        r = wb.gradcache.encode(model, x, 3)
    assert_same(loss, expected, relative=1e-12)
    assert torch.equal(r, inner(x)) or (r - inner(x)).abs().max() < 1e-14
    assert not loss.requires_grad
    assert not r.requires_grad
    assert calls == [9], "one pass a chunk"
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()
    assert all(p.grad is None for p in inner.parameters())


def test_a_backward_pass_that_never_comes_leaves_nothing():
    """The graph alone holds a step; nothing waits for the garbage collector."""
    model, (x, y) = mlp(0, nn.BatchNorm1d(8)), batch(8)
    cache = wb.GradCache([model, model], 4, good_loss, deferred=True, keep_graphs=0.5)
    cache(x, y).backward()
    gc.unfreeze()  # objects that something has frozen are not listed
    gc.disable()
    try:
        # A caught error of an earlier test may hold its step until the next collection.
        earlier = [one for one in gc.get_objects() if type(one) is Step]
        inputs = [x.clone(), y.clone()]
        for _ in range(3):
            loss = cache(*inputs)
            r = wb.gradcache.encode(model, inputs[0], 4)
            steps = [
                weakref.ref(one)
                for one in gc.get_objects()
                if type(one) is Step and not any(one is another for another in earlier)
            ]
            assert len(steps) >= 2
            del loss, r
            assert not any(one() for one in steps)
        held = [weakref.ref(z) for z in inputs]
        inputs.clear()
        assert not any(z() is not None for z in held)
    finally:
        gc.enable()


def test_after_its_backward_pass_a_loss_holds_no_inputs():
    model = mlp(0)
    x, y = (z.clone() for z in batch(8))
    loss = wb.GradCache([model, model], 4, good_loss, deferred=True)(x, y)
    loss.backward(retain_graph=True)
    held = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert not any(z() is not None for z in held)
    assert loss.grad_fn is not None


def change_by_optimizer(model):
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def change_in_place(model):
    with torch.no_grad():
        model[2].bias.add_(1)


MISTAKES = {
    "an optimizer's step in between": (
        lambda model, loss: (change_by_optimizer(model), loss.backward())[0],
        r"a parameter of model 0 .*, of shape \(1,\), has been changed since the forward pass",
    ),
    "a changed parameter": (
        lambda model, loss: (change_in_place(model), loss.backward())[0],
        r"a parameter of model 0 .*, of shape \(4,\), has been changed since the forward pass",
    ),
    "create_graph": (
        lambda model, loss: loss.backward(create_graph=True),
        "cannot be differentiated again: leave out create_graph=True",
    ),
    "inputs": (
        lambda model, loss: loss.backward(inputs=[model.scale]),
        r"torch\.autograd\.grad or backward\(inputs=\.\.\.\) ask for it elsewhere: call loss\.backward\(\)",
    ),
}


class WithScale(nn.Sequential):
    def __init__(self):
        super().__init__(*mlp(0))
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))

    def forward(self, x):
        for layer in [self[0], self[1], self[2]]:
            x = layer(x)
        return x


def mistakes_body():
    """A mistake of the last rank raises on all ranks, gradients are as they were, and the next step is right."""
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    x, y = batch(6)
    for name, (mistake, message) in MISTAKES.items():
        for accumulated in (False, True):
            if name == "an optimizer's step in between" and not accumulated:
                continue  # it would have no gradients to make a step with
            model = WithScale()
            cache = wb.GradCache([model, model], SIZE, partial(scaled_loss, model), deferred=True)
            for p in model.parameters():
                p.grad = torch.ones_like(p) if accumulated else None
            loss, before = cache(x, y), copy.deepcopy(model.state_dict())
            with pytest.raises(ValueError, match=message):
                (mistake if last else right)(model, loss)
            for p in model.parameters():
                assert torch.equal(p.grad, torch.ones_like(p)) if accumulated else p.grad is None, name
            model.load_state_dict(before)
            cache(x, y).backward()


def right(_model, loss):
    loss.backward()


def scaled_loss(model, a, b):
    return good_loss(a, b) * model.scale.sum()


def twice_body():
    model, (x, y) = WithScale(), batch(6)
    loss = wb.GradCache([model, model], SIZE, partial(scaled_loss, model), deferred=True)(x, y)
    loss.backward(retain_graph=True)
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="has had its backward pass, and its gradient is counted"):
        loss.backward()
    assert all(torch.equal(p.grad, z) for p, z in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_backward_pass_raises_on_all_ranks(world_size):
    run_ranks(twice_body, world_size, timeout_s=60)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wrong_backward_pass_raises_on_all_ranks(world_size):
    run_ranks(mistakes_body, world_size, timeout_s=60)


def test_a_representation_that_the_loss_changes_raises():
    model, (x, y) = mlp(0), batch(6)
    with pytest.raises(ValueError, match=r"representation 0 of model 0 .* was changed in place .* change a copy"):
        wb.GradCache([model, model], SIZE, lambda a, b: good_loss(a.mul_(2), b), deferred=True)(x, y).backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_model_with_a_hidden_state_raises_in_the_backward_pass(accumulated):
    inner, calls, (x, y) = mlp(0), [0], batch(6)

    def encode(z):
        calls[0] += 1
        return inner(z) * (1 if calls[0] < 4 else 1.01)

    for p in inner.parameters():
        p.grad = torch.ones_like(p) if accumulated else None
    loss = wb.GradCache([encode, inner], 3, good_loss, deferred=True)(x, y)
    with pytest.raises(RuntimeError, match="gave another representation 0 than the first"):
        loss.backward()
    for p in inner.parameters():
        assert torch.equal(p.grad, torch.ones_like(p)) if accumulated else p.grad is None


def test_buffers_that_another_pass_has_moved_are_as_in_the_first_pass_and_stay_moved():
    """Between the passes of two losses, the running averages go on; the second passes see the first values."""
    model, (x, y) = mlp(0), batch(8)
    nn.utils.parametrizations.spectral_norm(model[0])  # whose output depends on its buffers
    plain = copy.deepcopy(model)
    losses = [good_loss(*(torch.cat([plain(part) for part in z.split(4)]) for z in pair)) for pair in ((x, y), (y, x))]
    (losses[0] + losses[1]).backward()
    true = gradients_of(plain)
    cache = wb.GradCache([model, model], 4, good_loss, deferred=True)
    first, second = cache(x, y), cache(y, x)
    (first + second).backward()
    assert_all_same(gradients_of(model), true)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_one_number_for_the_whole_batch_and_several_representations():
    model, (x, y) = TwoParts(), batch(7)

    def loss_of(a, b):
        return good_loss(a[0], b[0]) * a[2].exp() + (a[1] - b[1]).square().mean()

    loss_of(model(x), model(y)).backward()
    true = gradients_of(model)
    loss_of(wb.gradcache.encode(model, x, 3), wb.gradcache.encode(model, y, 2)).backward()
    assert_all_same(gradients_of(model), true)


def frozen_body():
    """A frozen encoder is encoded without a graph; one that is frozen on one rank alone raises on all."""
    frozen, model, (x, y) = mlp(0).requires_grad_(False), mlp(1), batch(6)
    good_loss(frozen(x), model(y)).backward()
    true = gradients_of(model)
    r = wb.gradcache.encode(frozen, x, 2)
    assert not r.requires_grad
    good_loss(r, wb.gradcache.encode(model, y, 2)).backward()
    assert_all_same(gradients_of(model), true)
    if dist.is_initialized() and dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="the same representations must have a gradient on all ranks"):
            wb.gradcache.encode(model.requires_grad_(dist.get_rank() == 0), y, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_frozen_encoder_has_no_graph(world_size):
    run_ranks(frozen_body, world_size, timeout_s=60)


def test_a_checkpoint_around_the_loss():
    """A checkpoint calls the loss again in the backward pass, which needs no second graph of the encoders."""
    model, loss_fn, (x, y) = mlp(0), Clip(), batch(8)
    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model, loss_fn)
    a, b = (wb.gradcache.encode(model, z, 3) for z in (x, y))
    checkpoint(loss_fn, a, b, use_reentrant=False).backward()
    assert_all_same(gradients_of(model, loss_fn), true)


def test_compiled_encoders():
    model, loss_fn, (x, y) = mlp(0), Clip(), batch(8)
    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model, loss_fn)
    compiled = torch.compile(model, backend="eager")
    (wb.GradCache([compiled, compiled], 4, loss_fn, deferred=True)(x, y) * 2).backward()
    assert_all_times(gradients_of(model, loss_fn), true, 2.0)


def grad_mode_body():
    model, (x, y) = mlp(0), batch(4)
    cache = wb.GradCache([model, model], 2, good_loss, deferred=True)
    with (
        torch.set_grad_enabled(dist.get_rank() == 0),
        pytest.raises(ValueError, match=r"is_grad_enabled\(\) must be the same on all ranks, got \[True, False\]"),
    ):
        cache(x, y)
    cache(x, y).backward()
    assert model[0].weight.grad.isfinite().all()


def test_ranks_evaluate_together():
    run_ranks(grad_mode_body, 2, timeout_s=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deferred": 1}, "deferred must be True or False, got 1"),
        ({"deferred": True, "scaler": torch.amp.GradScaler("cpu")}, "scaler must be None with deferred=True"),
    ],
)
def test_wrong_settings(arguments, message):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        wb.GradCache([model, model], 2, good_loss, **arguments)


def encode_mistakes_body():
    model, (x, _) = mlp(0), batch(6)
    last = dist.get_rank() == dist.get_world_size() - 1
    for arguments, message, kind in (
        ((model, x, 0), "chunk_sizes must be a positive integer", ValueError),
        ((model, "text", 2), "takes a split_input_fn", ValueError),
        ((None, x, 2), "models must be a list of modules or functions", ValueError),
        ((model, x), "missing a required argument: 'chunk_size'", TypeError),
    ):
        with pytest.raises(kind, match=message):
            wb.gradcache.encode(*(arguments if last else (model, x, 2)))
    wb.gradcache.encode(model, x, 2).sum().backward()
    loss, true = wb.gradcache.encode(model, x, 2).sum(), gradients_of(model)
    with pytest.raises(ValueError, match="of a cached step cannot be differentiated again"):
        loss.backward(create_graph=last)
    assert gradients_of(model) == [None] * 4
    wb.gradcache.encode(model, x, 2).sum().backward()
    assert_all_same(gradients_of(model), true)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_wrong_call_of_encode_raises_on_all_ranks(world_size):
    run_ranks(encode_mistakes_body, world_size, timeout_s=60)
