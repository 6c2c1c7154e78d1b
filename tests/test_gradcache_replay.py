"""The second pass of gradient caching replays the first: random numbers, buffers, autocast, checkpoints."""

import copy
import math
import random

import pytest
import torch
from gradcache_models import OUT, Clip, LateMaximum, assert_all_same, batch, gradients_of, mlp
from torch import nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

import wholebatch as wb


class Noise(nn.Module):
    """A module that draws from every random number generator."""

    def forward(self, x):
        import numpy

        return x * random.random() + numpy.random.rand() * torch.rand_like(x)


@pytest.mark.parametrize("keep", [0, 3, 1.0])
def test_dropout_masks_are_the_same_in_both_passes(keep):
    models, loss_fn, (x, y) = [mlp(0, nn.Dropout(0.4)), mlp(1, nn.Dropout(0.2), Noise())], Clip(), batch(10)
    seen = []
    for model in models:
        model[2].register_forward_hook(lambda _module, _args, out: seen.append(out == 0))
    torch.manual_seed(5)
    random.seed(5)
    __import__("numpy").random.seed(5)
    parts = [torch.cat([model(part) for part in z.split(3)]) for model, z in zip(models, (x, y), strict=True)]
    after = torch.rand(1), random.random()
    loss_fn(*parts).backward()
    true, masks = gradients_of(*models, loss_fn), [*seen]
    seen.clear()
    torch.manual_seed(5)
    random.seed(5)
    __import__("numpy").random.seed(5)
    wb.GradCache(models, 3, loss_fn, keep_graphs=keep)(x, y)
    assert (torch.rand(1), random.random()) == after, "generators continue from their state after the first pass"
    again = seen[len(masks) :]
    assert len(again) == (8 - round(keep * 8) if isinstance(keep, float) else 8 - keep)
    assert all(torch.equal(a, b) for a, b in zip(again, masks[len(masks) - len(again) :], strict=True))
    assert_all_same(gradients_of(*models, loss_fn), true)


@pytest.mark.parametrize("keep", [0, 1, 1.0])
def test_running_averages_count_every_chunk_once(keep):
    model, loss_fn, (x, y) = mlp(0, nn.BatchNorm1d(8)), Clip(), batch(10)
    plain = copy.deepcopy(model)
    loss_fn(*(torch.cat([plain(part) for part in z.split(4)]) for z in (x, y))).backward()
    true = gradients_of(plain)
    wb.GradCache([model, model], 4, loss_fn, keep_graphs=keep)(x, y)
    assert_all_same(gradients_of(model), true)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert int(model[2].num_batches_tracked) == 6


def test_the_second_pass_uses_the_buffers_of_the_first():
    """The vectors of spectral norm move in each pass, and the next pass uses them."""
    model, loss_fn, (x, y) = mlp(0), Clip(), batch(10)
    nn.utils.parametrizations.spectral_norm(model[0])
    plain = copy.deepcopy(model)
    loss_fn(*(torch.cat([plain(part) for part in z.split(4)]) for z in (x, y))).backward()
    true = gradients_of(plain)
    wb.GradCache([model, model], 4, loss_fn)(x, y)
    assert_all_same(gradients_of(model), true)


@pytest.mark.parametrize("keep", [0, 2, 1.0])
def test_under_the_callers_autocast(keep):
    """A weight that was cast without gradient in the first pass must not be used in the second."""
    model, (x, y) = mlp(0).float(), [z.float() for z in batch(8)]

    def loss_fn(a, b):
        return wb.functional.clip_loss(normalize(a.float(), dim=1), normalize(b.float(), dim=1), 5.0)

    with torch.autocast("cpu", torch.bfloat16):
        loss_fn(model(x), model(y)).backward()
        true = gradients_of(model)
        wb.GradCache([model, model], 2, loss_fn, keep_graphs=keep)(x, y)
    found = gradients_of(model)
    assert all(z is not None for z in found)
    assert_all_same(found, true, relative=2e-2)


def test_float16_works_with_a_scaler():
    model, (x, y) = mlp(0).float(), [z.float() for z in batch(8)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss_fn(a, b):
        return wb.functional.clip_loss(normalize(a.float(), dim=1), normalize(b.float(), dim=1), 5.0)

    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = wb.GradCache([model, model], 2, loss_fn, fp16=True, scaler=scaler)(x, y)
    assert loss < 10, "the loss is not scaled"
    scaler.unscale_(optimizer)
    assert_all_same(gradients_of(model), true, relative=2e-2)
    scaler.update()
    wb.GradCache([model, model], 2, lambda a, b: loss_fn(a, b) * math.inf, fp16=True, scaler=scaler)(x, y)
    before = copy.deepcopy(model.state_dict())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0, "the step is skipped"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("keep", [0, 1, "auto"])
def test_checkpointed_compiled_and_partly_frozen_encoders(keep):
    loss_fn, (x, y) = Clip(), batch(8)
    frozen = mlp(1)
    frozen[0].requires_grad_(False)
    plain = [mlp(0, nn.Dropout(0.3)), frozen]
    models = [Checkpointed(plain[0]), torch.compile(frozen, backend="aot_eager")]
    torch.manual_seed(3)
    loss_fn(
        *(torch.cat([model(part) for part in z.split(3)]) for model, z in zip(plain, (x, y), strict=True))
    ).backward()
    true = gradients_of(*plain, loss_fn)
    torch.manual_seed(3)
    wb.GradCache(models, 3, loss_fn, keep_graphs=keep)(x, y)
    assert_all_same(gradients_of(*plain, loss_fn), true)


def test_buffers_changed_late_or_by_another_model_are_replayed():
    model, loss_fn, (x, y) = mlp(0, LateMaximum()), Clip(), batch(9)
    x = x / 100
    x[-3:] *= 1000
    norm = nn.BatchNorm1d(8).double()
    models = [
        nn.Sequential(model, nn.Linear(OUT, 8).double(), norm),
        nn.Sequential(mlp(1), nn.Linear(OUT, 8).double(), norm),
    ]
    plain = copy.deepcopy(models)
    loss_fn(*(torch.cat([m(part) for part in z.split(3)]) for m, z in zip(plain, (x, y), strict=True))).backward()
    true = gradients_of(*plain)
    wb.GradCache(models, 3, loss_fn)(x, y)
    assert_all_same(gradients_of(*models), true)
    for (name, buffer), (_, other) in zip(models[0].named_buffers(), plain[0].named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
