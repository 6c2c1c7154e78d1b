"""Gradient caching: the gradient of the batch as a whole, whatever the chunks, the inputs and the engine."""

import copy
import math
import random
import sys
import warnings
import weakref
from collections import UserDict
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from ddp import counting
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

D, OUT = 5, 4
KEEP = [0, 2, 0.5, 1.0, "auto"]


def mlp(seed, *middle):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), *middle, nn.Linear(8, OUT)).double()


class Clip(nn.Module):
    """CLIP's loss with its own scale."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x, y, **options):
        x, y = (normalize(z, dim=1) for z in (x, y))
        return wb.functional.clip_loss(x, y, self.log_scale.exp(), **options)


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, D, dtype=torch.float64, generator=generator) for _ in range(2)]


def gradients_of(*modules):
    """By name, None where there is none; and no longer there."""
    found = [p.grad for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    return found


def assert_all_same(got, expected, relative=1e-10):
    assert len(got) == len(expected)
    assert any(z is not None for z in expected)
    for z, true in zip(got, expected, strict=True):
        assert (z is None) == (true is None)
        if true is not None:
            assert_same(z, true, relative=relative)


# Equal to the uncached gradient.
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("chunk_sizes", [1, 3, 4, 12, 100, [5, 2]], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_is_that_of_the_whole_batch(chunk_sizes, tied, keep):
    one, loss_fn, (x, y) = mlp(0), Clip(), batch(12)
    models = [one, one if tied else mlp(1)]
    expected = loss_fn(models[0](x), models[1](y), label_smoothing=0.1)
    expected.backward()
    true = gradients_of(*models, loss_fn)
    cache = wb.GradCache(models, chunk_sizes, loss_fn, keep_graphs=keep)
    for step in (cache, cache.cache_step):
        loss = step(x, y, label_smoothing=0.1, no_sync_except_last=True)
        assert not loss.requires_grad
        assert_same(loss, expected.detach(), relative=1e-12)
        assert_all_same(gradients_of(*models, loss_fn), true)


class Many(nn.Module):
    """Takes its input in any form."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(0)

    def forward(self, a, b=None, options=None):
        if isinstance(a, dict):
            a, b = a["a"], a["b"]
        return SimpleNamespace(pooled=self.inner(a + (2 * b if options is None else options["times"] * b)))


FORMS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"a": a, "b": b},
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "list and dict": lambda a, b: ([a], {"b": b}),
    "nested": lambda a, b: [{"a": a, "b": b}],
    "with what is no tensor": lambda a, b: {"a": a, "b": b, "options": {"times": 2, "names": ["x"]}},
    "with a number for all": lambda a, b: {"a": a, "b": b, "options": {"times": torch.tensor(2.0)}},
}


@pytest.mark.parametrize("form", FORMS)
def test_inputs_of_any_form(form):
    model, (a, b), (y, _) = Many(), batch(7), batch(7, seed=1)
    other, loss_fn = mlp(1), Clip()
    loss_fn(model(a, b).pooled, other(y)).backward()
    true = gradients_of(model, other, loss_fn)
    cache = wb.GradCache([model, other], 3, loss_fn, get_rep_fn=lambda out: getattr(out, "pooled", out))
    cache(FORMS[form](a, b), y)
    assert_all_same(gradients_of(model, other, loss_fn), true)


def test_a_model_that_writes_into_its_input():
    """As sentence-transformers' modules do: what they write is not there in the second pass, and does not stay."""
    inner, other, loss_fn, (x, y), written = mlp(0), mlp(1), Clip(), batch(6), []

    def encode(features):
        assert "states" not in features
        features["states"] = inner[0](features["x"])
        written.append(weakref.ref(features["states"]))
        features["found"] = inner[1:](features["states"])
        return features

    def loss_of(a, b):
        assert not any(states() is not None for states in written), "no states of the first pass are left"
        return loss_fn(a, b)

    loss_fn(inner(x), other(y)).backward()
    true = gradients_of(inner, other, loss_fn)
    given = {"x": x}
    wb.GradCache([encode, other], 2, loss_of, get_rep_fn=lambda out: out["found"] if isinstance(out, dict) else out)(
        [given], y
    )
    assert_all_same(gradients_of(inner, other, loss_fn), true)
    assert len(written) == 6
    assert given.keys() == {"x"}
    r, again = wb.gradcache.cached(lambda features: encode(features)["found"])(given)
    r.sum().backward()
    again(r)
    assert given.keys() == {"x"}


def test_a_split_function_of_the_caller():
    """Texts, which no tensor counts."""
    words, embedding, loss_fn = ["a", "bb", "ccc", "dd", "e"], nn.Embedding(4, OUT).double(), Clip()

    def encode(texts):
        return embedding(torch.tensor([len(text) for text in texts]))

    def split(texts, size):
        return [{"texts": texts[k : k + size]} for k in range(0, len(texts), size)]

    other, (y, _) = mlp(0), batch(5)
    loss_fn(encode(words), other(y)).backward()
    true = gradients_of(embedding, other, loss_fn)
    cache = wb.GradCache(
        [encode, other], 2, loss_fn, lambda z, size: split(z, size) if isinstance(z, list) else [*z.split(size)]
    )
    cache(words, y)
    assert_all_same(gradients_of(embedding, other, loss_fn), true)


class TwoParts(nn.Module):
    """Two representations, and a scale that belongs to the whole batch."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = mlp(0), nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, x):
        z = self.inner(x)
        return z, z[:, :2].square(), self.scale


@pytest.mark.parametrize("keep", [0, 1, 1.0])
def test_several_representations_and_a_number_for_the_whole_batch(keep):
    model, (x, y) = TwoParts(), batch(7)

    def loss_fn(of_x, of_y):
        (a, a_part, scale), (b, b_part, _) = of_x, of_y
        both = [wb.functional.info_nce_loss(*pair, logit_scale=scale) for pair in ((a, b), (a_part, b_part))]
        return both[0] + 2 * both[1] + scale.square()

    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model)
    wb.GradCache([model, model], 3, loss_fn, keep_graphs=keep)(x, y)
    assert_all_same(gradients_of(model), true)


def test_hard_negatives_by_a_third_model_and_losses_with_keywords():
    models, (x, y), (n, _) = [mlp(0), mlp(1), mlp(1)], batch(6), batch(9, seed=2)
    weights = torch.rand(6, dtype=torch.float64)

    def loss_fn(a, b, negatives, weights):
        return wb.functional.info_nce_loss(a, b, logit_scale=0.3, negatives=negatives, weights=weights)

    loss_fn(models[0](x), models[1](y), models[2](n), weights).backward()
    true = gradients_of(*models)
    wb.GradCache(models, [2, 3, 4], loss_fn)(x, y, n, weights=weights)
    assert_all_same(gradients_of(*models), true)


# What is replayed.
class Noise(nn.Module):
    """Random numbers of everyone who has some."""

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
    assert (torch.rand(1), random.random()) == after, "generators go on from where the first pass left them"
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


def test_buffers_that_the_output_depends_on():
    """Spectral norm's vectors move in each pass, and the next pass sees them."""
    model, loss_fn, (x, y) = mlp(0), Clip(), batch(10)
    nn.utils.parametrizations.spectral_norm(model[0])
    plain = copy.deepcopy(model)
    loss_fn(*(torch.cat([plain(part) for part in z.split(4)]) for z in (x, y))).backward()
    true = gradients_of(plain)
    wb.GradCache([model, model], 4, loss_fn)(x, y)
    assert_all_same(gradients_of(model), true)


@pytest.mark.parametrize("keep", [0, 2, 1.0])
def test_under_the_callers_autocast(keep):
    """A weight that was cast without gradient in the first pass must not serve the second."""
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


def test_float16_with_a_scaler():
    model, (x, y) = mlp(0).float(), [z.float() for z in batch(8)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss_fn(a, b):
        return wb.functional.clip_loss(normalize(a.float(), dim=1), normalize(b.float(), dim=1), 5.0)

    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = wb.GradCache([model, model], 2, loss_fn, fp16=True, scaler=scaler)(x, y)
    assert loss < 10, "as it is, not scaled"
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


def test_accumulation_and_clipping():
    """Two cached steps add up, and what they add to is not lost."""
    model, loss_fn = mlp(0), Clip()
    batches = [batch(6, seed) for seed in (1, 2)]
    for x, y in batches:
        (loss_fn(model(x), model(y)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    true = gradients_of(model, loss_fn)
    cache = wb.GradCache([model, model], 4, lambda a, b: loss_fn(a, b) / 2)
    for x, y in batches:
        cache(x, y)
    assert_same(nn.utils.clip_grad_norm_(model.parameters(), 0.01), norm, relative=1e-10)
    assert_all_same(gradients_of(model, loss_fn), true)


# The plausible wrong answers.
def naive_step(model, size, loss_fn, x, y):
    """Two passes and nothing else: no replay, no engine told to wait."""
    with torch.no_grad():
        found = [torch.cat([model(part) for part in z.split(size)]).requires_grad_() for z in (x, y)]
    loss_fn(*found).backward()
    for z, r in zip((x, y), found, strict=True):
        for part, grad in zip(z.split(size), r.grad.split(size), strict=True):
            model(part).backward(grad)


def away(found, true):
    return max(((z - t).norm() / t.norm()).item() for z, t in zip(found, true, strict=True))


def test_two_passes_without_replay_are_wrong():
    """Right where nothing is to be replayed, wrong with dropout; buffers move twice; chunks' losses do not add up."""
    loss_fn, (x, y) = Clip(), batch(10)
    plain = mlp(0)
    loss_fn(plain(x), plain(y)).backward()
    true = gradients_of(plain)
    naive_step(plain, 3, loss_fn, x, y)
    assert away(gradients_of(plain), true) < 1e-10
    for a, b in zip(x.split(5), y.split(5), strict=True):
        (loss_fn(plain(a), plain(b)) / 2).backward()
    assert away(gradients_of(plain), true) > 0.02, "gradient accumulation"

    dropped = mlp(0, nn.Dropout(0.4), nn.BatchNorm1d(8))
    torch.manual_seed(1)
    loss_fn(*(torch.cat([dropped(part) for part in z.split(5)]) for z in (x, y))).backward()
    true = gradients_of(dropped)
    for step, right in (
        (wb.GradCache([dropped] * 2, 5, loss_fn), True),
        (partial(naive_step, dropped, 5, loss_fn), False),
    ):
        before = int(dropped[3].num_batches_tracked)
        torch.manual_seed(1)
        step(x, y)
        assert (away(gradients_of(dropped), true) < 1e-10) is right
        assert int(dropped[3].num_batches_tracked) - before == (4 if right else 8)


def naive_body():
    rows = Partition((6, 6)).rows(dist.get_rank())
    x, y = batch(12)
    model = DistributedDataParallel(mlp(0))
    reduced = counting(model)
    naive_step(model, 2, good_loss, x[rows], y[rows])
    return len(reduced)


def test_two_passes_under_ddp_reduce_in_every_chunk():
    assert run_ranks(naive_body, 2, timeout_s=60) == [6, 6]


# Kept graphs.
class Counted(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x):
        self.calls += 1
        return self.model(x)


@pytest.mark.parametrize(
    ("keep", "budget", "passes"),
    [(0, None, 16), (3, None, 13), (0.5, None, 12), (1.0, None, 8), (100, None, 8), ("auto", None, 8), ("auto", 0, 16)],
)
def test_kept_graphs_need_no_second_pass(keep, budget, passes):
    model, (x, y) = Counted(mlp(0)), batch(8)
    wb.GradCache([model, model], 2, Clip(), keep_graphs=keep, memory_budget=budget)(x, y)
    assert model.calls == passes


def test_a_budget_keeps_what_fits_and_leaves_room_for_one_more():
    """A chunk's graph holds tanh's output: 2 rows of 8 numbers of 8 bytes. The input is there anyway."""
    model, (x, y) = Counted(mlp(0)), batch(8)
    each = 2 * 8 * 8
    for room in range(1, 6):
        model.calls = 0
        wb.GradCache([model, model], 2, Clip(), keep_graphs="auto", memory_budget=room * each)(x, y)
        assert 16 - model.calls == room - 1


def test_out_of_memory_in_a_kept_graph_keeps_fewer():
    model, loss_fn, (x, y) = mlp(0), Clip(), batch(12)
    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model, loss_fn)
    calls = []

    def encode(z):
        calls.append(torch.is_grad_enabled())
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(z)

    with pytest.warns(RuntimeWarning, match="out of memory with 4 kept graphs; going on with 2") as caught:
        wb.GradCache([encode, encode], 2, loss_fn, keep_graphs=1.0)(x, y)
    assert len(caught) == 1
    first_of_the_second_model = [True]
    assert calls[5:13] == [False] * 2 + first_of_the_second_model + [False] * 5, "the one that failed, and what follows"
    assert len(calls) == 5 + 8 + 10
    assert_all_same(gradients_of(model, loss_fn), true)


def test_out_of_memory_with_running_averages():
    model, loss_fn, (x, y) = mlp(0, nn.BatchNorm1d(8)), Clip(), batch(12)
    plain, held, calls = copy.deepcopy(model), dict(model.named_buffers()), [0]
    loss_fn(*(torch.cat([plain(part) for part in z.split(4)]) for z in (x, y))).backward()
    true = gradients_of(plain)

    def encode(z):
        calls[0] += 1
        found = model(z)
        if calls[0] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    with pytest.warns(RuntimeWarning, match="out of memory"):
        wb.GradCache([encode, encode], 4, loss_fn, keep_graphs=1.0)(x, y)
    assert_all_same(gradients_of(model), true)
    for name, buffer in model.named_buffers():
        assert buffer is held[name]
        assert torch.equal(plain.get_buffer(name), buffer), name


class LateMaximum(nn.Module):
    """A running maximum, which a chunk with larger entries moves, and which the output depends on.

    The gradient needs it as it was: a copy of it, or what later chunks overwrite.
    """

    def __init__(self, copied=True):
        super().__init__()
        self.copied = copied
        self.register_buffer("largest", torch.ones((), dtype=torch.float64))

    def forward(self, z):
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, z.abs().max()))
        return z / (self.largest.clone() if self.copied else self.largest)


def test_buffers_that_move_late_or_by_another_model():
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


def test_hooks_of_the_losss_parameters_run_once():
    model, loss_fn, (x, y) = mlp(0), Clip(), batch(4)
    calls = []
    loss_fn.log_scale.register_hook(lambda grad: calls.append(grad) or 0.1 * grad)
    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model, loss_fn)
    wb.GradCache([model, model], 2, loss_fn)(x, y)
    assert_all_same(gradients_of(model, loss_fn), true)
    assert len(calls) == 2


def test_complex_representations():
    model, (x, y) = mlp(0), batch(4)

    def loss_fn(a, b):
        return (a * b.conj()).real.logsumexp(0).sum()

    def encode(z):
        return torch.view_as_complex(model(z).unflatten(1, (2, 2)))

    loss_fn(encode(x), encode(y)).backward()
    true = gradients_of(model)
    wb.GradCache([encode, encode], 2, loss_fn)(x, y)
    assert_all_same(gradients_of(model), true)


# Engines.
class Joint(nn.Module):
    """Both towers and the scale in one module, as open_clip has them."""

    def __init__(self):
        super().__init__()
        self.image, self.text = mlp(0), mlp(1, nn.BatchNorm1d(8))
        self.log_scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x, y):
        return self.image(x), self.text(y), self.log_scale.exp()


def joint_loss(parts):
    x, y, scale = parts
    return wb.functional.clip_loss(normalize(x, dim=1), normalize(y, dim=1), scale)


def ddp_body(counts, sizes, keep):
    """Tied and untied encoders, a loss of its own engine, and all in one module: as the whole batch on one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = Partition(counts).rows(rank)
    size, (x, y) = sizes[rank % len(sizes)], batch(sum(counts))
    keep = keep[rank % len(keep)] if isinstance(keep, tuple) else keep

    for tied in (True, False):
        plain, loss_fn = [mlp(0), mlp(1)], Clip()
        if tied:
            plain[1] = plain[0]
        dense = copy.deepcopy(plain) if not tied else [copy.deepcopy(plain[0])] * 2
        single = copy.deepcopy(loss_fn)
        wb.reference.clip_loss(
            normalize(dense[0](x), dim=1), normalize(dense[1](y), dim=1), single.log_scale.exp()
        ).backward()
        models = [DistributedDataParallel(plain[0])]
        models.append(models[0] if tied else DistributedDataParallel(plain[1]))
        engine = DistributedDataParallel(loss_fn)
        reduced = [counting(model) for model in (*models[: 1 if tied else 2], engine)]
        for step in range(2):  # DDP arranges its buckets anew after the first
            wb.GradCache(models, size, engine, keep_graphs=keep)(x[rows], y[rows])
            assert_all_same(
                gradients_of(*plain[: 1 if tied else 2], loss_fn), gradients_of_kept(*dense[: 1 if tied else 2], single)
            )
            for buckets in reduced:
                assert buckets == [0], (step, buckets)
                buckets.clear()

    whole = Joint().train()
    alone = copy.deepcopy(whole)
    whole.text[2].eval(), alone.text[2].eval()  # a chunk's own statistics would be another batch's
    joint_loss_dense(alone(x, y)).backward()
    model, true = DistributedDataParallel(whole), gradients_of_kept(alone)
    counted = counting(model)
    for _ in range(2):
        loss = wb.GradCache([model], size, joint_loss, keep_graphs=keep)([x[rows], y[rows]])
        assert_same(loss, joint_loss_dense(alone(x, y)).detach(), relative=1e-12)
        assert_all_same(gradients_of(whole), true)
        assert counted == [0]
        counted.clear()

    # One encoder for both, with a scale among its outputs, of which the loss takes one.
    tied = TwoParts()
    alone = copy.deepcopy(tied)
    (a, _, scale), (b, _, _) = alone(x), alone(y)
    joint_loss_dense((a, b, scale)).backward()
    engine = DistributedDataParallel(tied)
    reduced = counting(engine)
    for _ in range(2):
        wb.GradCache(
            [engine, engine],
            size,
            lambda of_x, of_y: joint_loss((of_x[0], of_y[0], of_x[1])),
            get_rep_fn=lambda out: (out[0], out[2]),
            keep_graphs=keep,
        )(x[rows], y[rows])
        assert_all_same(gradients_of(tied), gradients_of_kept(alone))
        assert reduced == [0]
        reduced.clear()

    # A parameter of the model that the loss takes past the engine.
    def past_the_engine(parts):
        return joint_loss((*parts[:2], whole.log_scale.exp()))

    wb.GradCache([model], size, past_the_engine, get_rep_fn=lambda out: out[:2], keep_graphs=keep)([x[rows], y[rows]])
    assert_all_same(gradients_of(whole), true)
    assert counted == [0]
    return world


def gradients_of_kept(*modules):
    return [p.grad for module in modules for p in module.parameters()]


def joint_loss_dense(parts):
    x, y, scale = parts
    return wb.reference.clip_loss(normalize(x, dim=1), normalize(y, dim=1), scale)


@pytest.mark.parametrize(
    ("counts", "sizes", "keep"),
    [
        ((7,), (3,), 1),
        ((4, 4), (1,), 0),
        ((4, 4), (4,), 1.0),
        ((7, 2), (2,), 0),
        ((7, 2), (1, 2), 1),
        ((7, 1), (1,), 1.0),
        ((5, 0, 4), (4, 2, 1), 1),
        ((3, 7, 1, 4), (1,), 0),
        ((7, 2), (2,), 2),
        ((4, 4), (2,), (0, 1.0)),
        ((5, 6), (1,), ("auto", 3)),
    ],
    ids=str,
)
def test_under_ddp_with_one_synchronization(counts, sizes, keep):
    assert run_ranks(ddp_body, len(counts), counts, sizes, keep, timeout_s=90) == [len(counts)] * len(counts)


def training_body(counts, sizes, keep, engine):
    """Dropout, hard negatives by a third input of their own number, a learned temperature: a step as it is trained."""
    rank = dist.get_rank()
    rows, local = Partition(counts).rows(rank), Partition([2 * count for count in counts]).rows(rank)
    size, (x, y), (n, _) = sizes[rank % len(sizes)], batch(sum(counts)), batch(2 * sum(counts), seed=1)
    plain, loss_fn = mlp(0, nn.Dropout(0.4)), Hard()
    alone, single = copy.deepcopy(plain), copy.deepcopy(loss_fn)
    model = DistributedDataParallel(plain) if engine == "ddp" else sharded(plain, plain[0], plain[3])
    of_loss = DistributedDataParallel(loss_fn)
    reduced = [counting(of_loss), *([counting(model)] if engine == "ddp" else [])]
    torch.manual_seed(7 + rank)
    loss = wb.GradCache([model] * 3, size, of_loss, keep_graphs=keep)(x[rows], y[rows], n[local])

    # The same masks on one process: each rank's, in the order in which it drew them.
    towers = [[], [], []]
    for other in range(len(counts)):
        torch.manual_seed(7 + other)
        at, of_other = Partition(counts).rows(other), Partition([2 * c for c in counts]).rows(other)
        for tower, z in zip(towers, (x[at], y[at], n[of_other]), strict=True):
            tower += [alone(part) for part in z.split(sizes[other % len(sizes)])]
    features = [torch.cat(parts) for parts in towers]
    true = single(*features, loss=wb.reference.info_nce_loss)
    true.backward()
    assert_same(loss, true.detach(), relative=1e-12)
    found = [p.grad.full_tensor() if engine == "fsdp2" else p.grad for p in model.parameters()]
    assert_all_same(found, gradients_of_kept(alone))
    assert_all_same(gradients_of_kept(loss_fn), gradients_of_kept(single))
    assert reduced == [[0]] * len(reduced)


class Hard(nn.Module):
    """InfoNCE against hard negatives, with its own temperature."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x, y, n, loss=wb.functional.info_nce_loss):
        x, y, n = (normalize(z, dim=1) for z in (x, y, n))
        return loss(x, y, logit_scale=self.log_scale.exp(), negatives=n)


@pytest.mark.parametrize(
    ("counts", "sizes", "keep", "engine"),
    [
        ((7,), (3,), 0, "ddp"),
        ((7, 3), (2,), 0, "ddp"),
        ((3, 6), (4, 1), 0.5, "ddp"),
        ((4, 0, 5), (2,), 1, "ddp"),
        ((2, 5, 3, 4), (1, 2), 0, "ddp"),
        ((5, 4, 1, 3), (2,), "auto", "ddp"),
        ((4, 4), (2,), 0, "fsdp2"),
        ((5, 4), (2,), 1, "fsdp2"),
    ],
    ids=str,
)
def test_dropout_hard_negatives_and_a_learned_temperature(counts, sizes, keep, engine):
    run_ranks(training_body, len(counts), counts, sizes, keep, engine, timeout_s=90)


def sharded(module, *parts):
    """By FSDP2, over all ranks: the parts each by itself, then the rest."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in parts:
        fully_shard(part, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def fsdp_body(counts, keep):
    rows = Partition(counts).rows(dist.get_rank())
    x, y = batch(sum(counts))
    plain, loss_fn = mlp(0), Clip()
    alone, single = copy.deepcopy(plain), copy.deepcopy(loss_fn)
    single_loss = wb.reference.clip_loss(normalize(alone(x), dim=1), normalize(alone(y), dim=1), single.log_scale.exp())
    single_loss.backward()
    model = sharded(plain, plain[0], plain[2])
    for _ in range(2):
        loss = wb.GradCache([model, model], 2, loss_fn, keep_graphs=keep)(x[rows], y[rows])
        assert_same(loss, single_loss.detach(), relative=1e-12)
        for local, p in zip(model.parameters(), alone.parameters(), strict=True):
            assert_same(local.grad.full_tensor(), p.grad, relative=1e-10)
        assert_same(loss_fn.log_scale.grad, single.log_scale.grad, relative=1e-10)
        model.zero_grad()
        loss_fn.zero_grad()


@pytest.mark.parametrize(("counts", "keep"), [((4, 4), 0), ((4, 4), 1.0), ((5, 2), 1), ((0, 3), 0)], ids=str)
def test_under_fsdp2(counts, keep):
    run_ranks(fsdp_body, 2, counts, keep, timeout_s=90)


def dense_gradients(model, x, y):
    """Of the whole batch on one process."""
    wb.reference.clip_loss(model(x), model(y), 1.0).backward()
    return gradients_of_kept(model)


def odd_models_body():
    """What holds an engine without being one: compiled, a function, a method; and a loss that another engine shards."""
    rank = dist.get_rank()
    rows = Partition((6, 3)).rows(rank)
    x, y = batch(9)
    plain = mlp(0)
    true = dense_gradients(mlp(0), x, y)
    engine = DistributedDataParallel(plain)
    reduced = counting(engine)
    compiled = torch.compile(engine, backend="eager")
    for model in (compiled, lambda z: 1 * engine(z), engine.forward):
        for keep in (0, 1, 1.0):
            wb.GradCache([model, model], 2, good_loss, keep_graphs=keep)(x[rows], y[rows])
            assert_all_same(gradients_of(plain), true)
            assert reduced == [0], keep
            reduced.clear()

    # Two towers in one module, each a model: neither uses all parameters.
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = nn.ModuleList([mlp(0), mlp(1)])

        def forward(self, image=None, text=None):
            return self.towers[0](image) if text is None else self.towers[1](text)

    towers = Towers()
    dense = copy.deepcopy(towers)
    wb.reference.clip_loss(dense(image=x), dense(text=y), 1.0).backward()
    engine = DistributedDataParallel(towers, find_unused_parameters=True)
    for keep in (0, 2, 1.0):
        wb.GradCache([engine, engine], 2, good_loss, keep_graphs=keep)({"image": x[rows]}, {"text": y[rows]})
        assert_all_same(gradients_of(towers), gradients_of_kept(dense))

    encoder, single = mlp(0), Clip()
    wb.reference.clip_loss(*(normalize(mlp(0)(z), dim=1) for z in (x, y)), single.log_scale.exp()).backward()

    class Shaped(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

        def forward(self, a, b):
            return wb.functional.clip_loss(normalize(a, dim=1), normalize(b, dim=1), self.log_scale.exp())

    loss_fn = sharded(Shaped())
    wb.GradCache([encoder, encoder], 2, loss_fn)(x[rows], y[rows])
    assert_same(loss_fn.log_scale.grad.full_tensor()[0], single.log_scale.grad, relative=1e-10)


def test_engines_in_wrappers_and_functions_and_losses():
    run_ranks(odd_models_body, 2, timeout_s=90)


def after_an_error_body(engine):
    """A second pass that differs, on one rank: all raise, gradients are as they were, and the next step is right."""
    rank = dist.get_rank()
    rows = Partition((6, 6)).rows(rank)
    x, y = batch(12)
    plain = mlp(0)
    true = dense_gradients(mlp(0), x, y)
    model = DistributedDataParallel(plain) if engine == "ddp" else sharded(plain, plain[0], plain[2])
    for bad in (7, 8, 12):
        calls = [0]

        def encode(z, calls=calls, bad=bad):
            calls[0] += 1
            return model(z) * (1.5 if calls[0] == bad and rank == 1 else 1.0)

        with pytest.raises(RuntimeError if rank else ValueError, match="gave another representation"):
            wb.GradCache([encode, encode], 2, good_loss)(x[rows], y[rows])
        assert all(p.grad is None for p in model.parameters())
        wb.GradCache([model, model], 2, good_loss)(x[rows], y[rows])
        found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        assert_all_same(found, true)
        model.zero_grad()
    return True


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_step_after_an_error(engine):
    assert run_ranks(after_an_error_body, 2, engine, timeout_s=60) == [True, True]


def out_of_memory_body():
    """On one rank, in the second model: the first has kept what it could, and everybody ends in step."""
    rank = dist.get_rank()
    rows = Partition((6, 6)).rows(rank)
    x, y = batch(12)
    plain, alone = [mlp(0), mlp(1)], [mlp(0), mlp(1)]
    wb.reference.clip_loss(alone[0](x), alone[1](y), 1.0).backward()
    models, calls = [DistributedDataParallel(model) for model in plain], [0]

    def second(z):
        calls[0] += 1
        if rank == 0 and calls[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return models[1](z)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        wb.GradCache([models[0], second], 2, good_loss, keep_graphs=1.0)(x[rows], y[rows])
    assert_all_same(gradients_of_kept(*plain), gradients_of_kept(*alone))


def test_out_of_memory_on_one_rank():
    run_ranks(out_of_memory_body, 2, timeout_s=60)


def no_empty_chunk_body():
    """Ranks with other numbers of chunks, of what has no empty form: refused on all, where passes are collective."""
    model = sharded(nn.Embedding(4, OUT).double())
    texts = ["a", "bb", "ccc"] if dist.get_rank() else ["a"]

    def encode(texts):
        return model(torch.tensor([len(text) for text in texts]))

    cache = wb.GradCache(
        [encode, encode], 2, good_loss, lambda z, n: [{"texts": z[k : k + n]} for k in range(0, len(z), n)]
    )
    with pytest.raises(ValueError, match=r"different numbers of chunks, \[\[1, 1\], \[2, 2\]\]"):
        cache(texts, texts)
    with pytest.raises(ValueError, match="keep_graphs must be the same on all ranks"):
        wb.GradCache([model, model], 2, good_loss, keep_graphs=dist.get_rank())(*[torch.arange(4)] * 2)
    with pytest.raises(ValueError, match="keep_graphs='auto' might keep another number"):
        wb.GradCache([model, model], 2, good_loss, keep_graphs="auto")(*[torch.arange(4)] * 2)


def test_what_collective_passes_cannot_have():
    run_ranks(no_empty_chunk_body, 2, timeout_s=60)


# Where a function has its models from.
HIDDEN = {}


class Trainer:
    """Holds a model, and is none."""

    def __init__(self, model):
        self.model = model

    def encode(self, z):
        return self.model(z)

    def scaled(self, z, by):
        return by * self.model(z)


def by_global(z):
    return HIDDEN["model"](z)


def ways_to(model):
    """Functions that call a model which they do not hold themselves."""
    HIDDEN["model"], trainer = model, Trainer(model)

    def by_itself(z, depth=1):
        return model(z) if not depth else by_itself(z, depth - 1)

    return {
        "a global": by_global,
        "a method": trainer.encode,
        "a partial of a method": partial(trainer.scaled, by=1.0),
        "a list in a closure": lambda z, models=None: [trainer][0].encode(z),
        "a function that calls itself": by_itself,
        "a function that calls a function": lambda z: 1 * by_global(z),
        "a method of the module": getattr(model, "forward", None),
    }


def test_functions_that_hide_their_models():
    """Whatever they are called through, running averages count once."""
    loss_fn, (x, y) = Clip(), batch(8)
    for name in ways_to(None):
        model = mlp(0, nn.BatchNorm1d(8))
        plain = copy.deepcopy(model)
        loss_fn(*(torch.cat([plain(part) for part in z.split(4)]) for z in (x, y))).backward()
        true, encode = gradients_of(plain), ways_to(model)[name]
        wb.GradCache([encode, encode], 4, loss_fn)(x, y)
        assert_all_same(gradients_of(model), true)
        assert int(model[2].num_batches_tracked) == 4, name
        r, again = wb.gradcache.cached(encode)(x)
        r.sum().backward()
        again(r)
        assert int(model[2].num_batches_tracked) == 5, name


def test_modules_compiled_in_place():
    """Whose inner calls no hook sees."""
    (x, y), true = batch(8), None
    for compiled in (False, True):
        model = mlp(0, nn.BatchNorm1d(8))
        if compiled:
            model.compile(backend="eager")
        HIDDEN["model"] = model
        wb.GradCache([by_global, model], 4, good_loss)(x, y)
        found = gradients_of(model)
        assert_all_same(found, true or found)
        true = found
        assert int(model[2].num_batches_tracked) == 4
        r, again = wb.gradcache.cached(lambda model, z: model(z))(model, x)
        r.sum().backward()
        again(r)
        assert int(model[2].num_batches_tracked) == 5


def hidden_body(counts):
    rank = dist.get_rank()
    rows = Partition(counts).rows(rank)
    x, y = batch(sum(counts))
    true = dense_gradients(mlp(0), x, y)
    for name in ways_to(None):
        plain = mlp(0)
        engine = DistributedDataParallel(plain)
        reduced, encode = counting(engine), ways_to(engine)[name]
        wb.GradCache([encode, encode], 2, good_loss)(x[rows], y[rows])
        assert_all_same(gradients_of(plain), true)
        assert reduced == [0], name
        reduced.clear()
        calls = [[wb.gradcache.cached(encode)(part) for part in z[rows].split(2)] for z in (x, y)]
        wb.gradcache.cat_input_tensor(good_loss)(*([r for r, _ in tower] for tower in calls)).backward()
        for r, again in [*calls[0], *calls[1]]:
            again(r)
        assert_all_same(gradients_of(plain), true)
        assert reduced == [0], name

        plain = mlp(0)
        encode = ways_to(sharded(plain, plain[0], plain[2]))[name]
        with reductions() as reduced:
            wb.GradCache([encode, encode], 2, good_loss)(x[rows], y[rows])
        assert_all_same([p.grad.full_tensor() for p in plain.parameters()], true)
        assert reduced == [2], name
    return True


@contextmanager
def reductions():
    """How many groups of parameters FSDP2 reduces."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    reduce, count = _fsdp_param_group.foreach_reduce, [0]

    def counted(*args, **kwargs):
        count[0] += 1
        return reduce(*args, **kwargs)

    _fsdp_param_group.foreach_reduce = counted
    try:
        yield count
    finally:
        _fsdp_param_group.foreach_reduce = reduce


@pytest.mark.parametrize("counts", [(4, 4), (6, 2)], ids=str)
def test_engines_in_functions_that_hide_them(counts):
    run_ranks(hidden_body, 2, counts, timeout_s=90)


def test_passes_that_turn_out_to_be_collective():
    """Of a model that only the call finds, with other numbers of chunks on each rank: refused on all of them."""
    run_ranks(unforeseen_body, 2, timeout_s=60)


def unforeseen_body():
    plain = mlp(0)
    HIDDEN["deep"] = sharded(plain, plain[0], plain[2])
    x, y = batch(2 + 4 * dist.get_rank())

    def encode(z):
        return getattr(sys.modules[__name__], "HID" + "DEN")["deep"](z)

    with pytest.raises(ValueError, match="collective, which could not be seen before the call"):
        wb.GradCache([encode, encode], 2, good_loss)(x, y)


def fsdp_state_body():
    """What the caller has switched off stays off; what an error leaves behind does not come back."""
    rows = Partition((4, 4)).rows(dist.get_rank())
    x, y = batch(8)
    true = dense_gradients(mlp(0), x, y)
    plain, calls = mlp(0), [0]
    model = sharded(plain, plain[0], plain[2])
    step = wb.GradCache([model, model], 2, good_loss)
    with reductions() as reduced:
        model.set_requires_gradient_sync(False)
        step(x[rows], y[rows])
        assert reduced == [0]
        model.set_requires_gradient_sync(True)
        step(x[rows], y[rows])
        assert reduced == [2]
    assert_all_same([p.grad.full_tensor() for p in model.parameters()], [2 * z for z in true])
    model.zero_grad()

    def fails(z):
        calls[0] += 1
        found = model(z)
        if calls[0] == 6:
            raise MemoryError("in the second chunk's second pass, on all ranks")
        return found

    with pytest.raises(MemoryError):
        wb.GradCache([fails, fails], 2, good_loss)(x[rows], y[rows])
    assert all(p.grad is None for p in model.parameters())
    step(x[rows], y[rows])
    assert_all_same([p.grad.full_tensor() for p in model.parameters()], true)
    model.zero_grad()

    calls[0] = 0

    def loses_a_row(z):
        calls[0] += 1
        found = model(z)
        return found[:1] if calls[0] == 1 and dist.get_rank() else found

    with pytest.raises(ValueError, match="got 2 rows and returned 1"):
        wb.GradCache([loses_a_row, loses_a_row], 2, good_loss)(x[rows], y[rows])
    step(x[rows], y[rows])
    assert_all_same([p.grad.full_tensor() for p in model.parameters()], true)


def test_what_fsdp2_keeps_to_itself():
    run_ranks(fsdp_state_body, 2, timeout_s=60)


def renamed_body(counts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wholebatch.gradcache.parameter_sync._SWITCHES", ("a name that FSDP2 does not have",))
        fsdp_body(counts, 0)


def test_an_fsdp2_whose_switches_have_other_names():
    """Its public one does, until it is known what the caller has switched off (the test above then fails)."""
    run_ranks(renamed_body, 2, (4, 4), timeout_s=60)


def broadcast_body(counts):
    """DDP sets buffers to rank 0's in a step's first pass, which the second passes must see, too."""
    rank = dist.get_rank()
    rows = Partition(counts).rows(rank)
    x, y = batch(sum(counts))
    x[rows] *= 1 + 4 * rank
    model = DistributedDataParallel(nn.Sequential(LateMaximum(), mlp(0)))
    for _ in range(3):
        plain = copy.deepcopy(model.module)
        for buffer in plain.buffers():
            dist.broadcast(buffer, 0)
        towers = [torch.cat([plain(part) for part in z[rows].split(2)]) for z in (x, y)]
        good_loss(*towers).backward()  # its own rows' gradients, W times, as an engine averages them
        true = [p.grad / dist.get_world_size() for p in plain.parameters()]
        for z in true:
            dist.all_reduce(z)
        wb.GradCache([model, model], 2, good_loss)(x[rows], y[rows])
        assert_all_same(gradients_of(model), true)
        assert torch.equal(model.module[0].largest, plain[0].largest)


@pytest.mark.parametrize("counts", [(4, 4), (6, 2)], ids=str)
def test_buffers_that_ddp_broadcasts(counts):
    run_ranks(broadcast_body, 2, counts, timeout_s=60)


def no_graph_body():
    """A later chunk's representation has no graph, on one rank: an error on both, and the next step is right."""
    rank, calls = dist.get_rank(), [0]
    rows = Partition((6, 6)).rows(rank)
    x, y = batch(12)
    model = DistributedDataParallel(mlp(0))

    def encode(z):
        calls[0] += 1
        found = model(z)
        return found.detach() if rank and calls[0] in (8, 12) else found

    with pytest.raises((RuntimeError, ValueError), match="in the second pass, what model 0"):
        wb.GradCache([encode, encode], 2, good_loss)(x[rows], y[rows])
    assert all(p.grad is None for p in model.parameters())
    wb.GradCache([model, model], 2, good_loss)(x[rows], y[rows])
    assert_all_same(gradients_of(model), dense_gradients(mlp(0), x, y))


def test_a_graph_that_is_missing_in_the_second_pass():
    run_ranks(no_graph_body, 2, timeout_s=60)


# What would be silently wrong.
@pytest.mark.parametrize("keep", [1.0, "auto"])
def test_kept_graphs_whose_tensors_are_overwritten(keep):
    model, (x, y) = nn.Sequential(nn.Linear(D, 8), LateMaximum(copied=False), nn.Linear(8, OUT)).double(), batch(8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wb.GradCache([model, model], 2, good_loss, keep_graphs=keep)(x, 10 * y)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("keep", [0, 1.0])
def test_numbers_of_the_whole_batch_that_are_numbers_of_chunks(keep):
    model, (x, y) = mlp(0), batch(8)

    def encode(z):
        found = model(z)
        return found, found.square().mean()

    step = wb.GradCache([encode, model], 2, lambda a, b: good_loss(a[0], b) + a[1], keep_graphs=keep)
    with pytest.raises(ValueError, match=r"representation 1 of model 0 .* must be the same in every chunk"):
        step(x, y)


@pytest.mark.parametrize("keep", [0, 1, 1.0])
def test_one_model_with_other_representations_for_each_input(keep):
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


def test_representations_of_which_some_are_frozen():
    """A locked tower, and a fixed scale, beside what is trained."""
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


def test_what_runs_in_every_backward_pass_is_refused():
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


def test_gradients_of_free_parameters_are_put_back():
    """Of a parameter beside a module, and of modules that only later chunks call."""
    experts, free, calls, (x, y) = {"a": mlp(0), "b": mlp(1)}, nn.Parameter(torch.ones(OUT).double()), [0], batch(6)
    held = free.grad = torch.ones_like(free)

    def encode(z):
        calls[0] += 1
        found = experts["a" if calls[0] % 3 == 1 else "b"](z) * free
        return found * (1.01 if calls[0] == 6 else 1)

    with pytest.raises(RuntimeError, match="gave another representation 0 than the first"):
        wb.GradCache([encode, mlp(2)], 2, good_loss)(x, y)
    assert all(p.grad is None for model in experts.values() for p in model.parameters())
    assert free.grad is held
    assert torch.equal(held, torch.ones_like(free))


def test_a_second_pass_of_another_shape():
    model, calls, (x, y) = mlp(0), [0], batch(6)

    def encode(z):
        calls[0] += 1
        found = model(z)
        return found if calls[0] < 4 else (found, found)

    with pytest.raises(RuntimeError, match=r"gave shapes \[\(2, 4\), \(2, 4\)\], and the first \[\(2, 4\)\]"):
        wb.GradCache([encode, mlp(1)], 2, good_loss)(x, y)
    assert all(p.grad is None for p in model.parameters())


def test_sparse_matrices_and_buffers_that_grow():
    (x, y), adjacency = batch(6), torch.eye(D, dtype=torch.float64).to_sparse()
    inner = mlp(0)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner
            self.register_buffer("adjacency", adjacency)
            self.register_buffer("seen", torch.zeros(0, dtype=torch.float64))

        def forward(self, z):
            self.seen = torch.cat([self.seen, z.detach().mean()[None]])
            return self.inner(torch.sparse.mm(self.adjacency, z.T).T * (1 + self.seen.sum()))

    model = Graph()
    plain = copy.deepcopy(model)
    good_loss(*(torch.cat([plain(part) for part in z.split(2)]) for z in (x, y))).backward()
    for keep in (0, 1, "auto"):
        cached = copy.deepcopy(model)
        wb.GradCache([cached, cached], 2, good_loss, keep_graphs=keep)(x, y)
        assert_all_same(gradients_of(cached), gradients_of_kept(plain))
        assert torch.equal(cached.seen, plain.seen)


def test_a_transformer_in_evaluation_with_a_mask():
    """Without gradients PyTorch has a faster way, whose rows behind the mask are zeros."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, y = torch.randn(2, 6, 4, 8, dtype=torch.float64)
    mask = torch.arange(4)[None] >= torch.randint(1, 5, (6, 1))

    def encode(z, mask):
        return inner(z, src_key_padding_mask=mask).mean(1)

    good_loss(encode(x, mask), encode(y, mask)).backward()
    true = gradients_of(inner)
    wb.GradCache([encode, encode], 2, good_loss)([x, mask], [y, mask])
    assert_all_same(gradients_of(inner), true)


def test_one_chunk_of_activations_is_alive_at_a_time():
    """Whatever the batch: in both passes, and while the loss is computed."""
    model, states, most = mlp(0), [], [0]

    def alive():
        most[0] = max(most[0], sum(state() is not None for state in states))

    model[2].register_forward_pre_hook(lambda _module, args: alive() or states.append(weakref.ref(args[0])))

    def loss_fn(a, b):
        alive()
        return good_loss(a, b)

    for rows in (8, 32, 128):
        x, y = batch(rows)
        most[0] = 0
        wb.GradCache([model, model], 4, loss_fn)(x, y)
        assert most == [0], "of earlier chunks, when the next one comes"
        assert len(states) == 2 * 2 * rows // 4
        states.clear()
    wb.GradCache([model, model], 4, loss_fn, keep_graphs=3)(x, y)
    assert most == [3]


# The functional form.
def functional_body(counts, small):
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = Partition(counts).rows(rank)
    x, y = batch(sum(counts))
    plain, loss_fn = mlp(0, nn.Dropout(0.3)), Clip()
    alone, single = copy.deepcopy(plain), copy.deepcopy(loss_fn)
    model = DistributedDataParallel(plain) if dist.is_initialized() else plain
    reduced = counting(model) if dist.is_initialized() else [0]
    part = wb.gradcache.cached(lambda model, *, x: model(x))
    loss = wb.gradcache.cat_input_tensor(loss_fn)

    torch.manual_seed(rank)
    found, closures = ([], []), []
    for tower, z in enumerate((x[rows], y[rows])):
        for rows_of_part in z.split(small):
            r, again = part(model, x=rows_of_part)
            found[tower].append(r)
            closures.append((again, r))
    value = loss(found[0], y=found[1])
    value.backward()
    torch.rand(3)
    for again, r in closures:
        again(r)

    # The same masks on one process: each rank's, in the order in which it drew them.
    towers = [[], []]
    for other, count in enumerate(counts):
        torch.manual_seed(other)
        at = Partition(counts).rows(other)
        for tower, z in enumerate((x[at], y[at])):
            towers[tower] += [alone(part_of) for part_of in (z.split(small) if count else [])]
    true = single(*(torch.cat(parts) for parts in towers), group=wb.comm.LocalCommunicator())
    true.backward()
    assert_same(value.detach(), true.detach(), relative=1e-12)
    assert_all_same(gradients_of_kept(plain), gradients_of_kept(alone))
    assert_same(loss_fn.log_scale.grad, single.log_scale.grad, relative=1e-10)
    assert reduced == [0]


def test_the_functional_form():
    functional_body((7,), 3)


def unused_call_body():
    """Of two calls one is never gone back to; the other synchronizes all the same."""
    rank = dist.get_rank()
    model = DistributedDataParallel(mlp(0))
    encode = wb.gradcache.cached(lambda model, x: model(x))
    (x, y), alone = batch(4), mlp(0)
    alone(x).square().sum().div(2).backward()
    constant, never = encode(model, y[:2])
    r, again = encode(model, x[2 * rank : 2 * rank + 2])
    (r.square().sum() + 0 * constant.detach().sum()).backward()
    again(r)
    assert_all_same(gradients_of_kept(model), gradients_of_kept(alone))
    return never is not None


def test_a_call_that_is_never_gone_back_to():
    run_ranks(unused_call_body, 2, timeout_s=60)


@pytest.mark.parametrize("counts", [(4, 4), (6, 3)], ids=str)
def test_the_functional_form_under_ddp(counts):
    run_ranks(functional_body, 2, counts, 2, timeout_s=60)


def gathered_body(counts):
    """The recipe of the original: every rank computes the loss of all rows, times the world size; DDP averages."""
    rows, world = Partition(counts).rows(dist.get_rank()), dist.get_world_size()
    x, y = batch(sum(counts))
    plain = mlp(0)
    alone = copy.deepcopy(plain)
    wb.reference.info_nce_loss(alone(x), alone(y), logit_scale=0.5).backward()
    model = DistributedDataParallel(plain)

    @wb.gradcache.cat_input_tensor
    @wb.gradcache.gather_input_tensor
    def loss_fn(a, b):
        return wb.reference.info_nce_loss(a, b, logit_scale=0.5) * world

    encode = wb.gradcache.cached(lambda model, x: model(x))
    calls = [[encode(model, part) for part in z[rows].split(2)] for z in (x, y)]
    loss_fn([r for r, _ in calls[0]], b=[r for r, _ in calls[1]]).backward()
    for tower in calls:
        for r, again in tower:
            again([r])
    assert_all_same(gradients_of_kept(plain), gradients_of_kept(alone))


def test_the_originals_recipe_for_several_processes():
    run_ranks(gathered_body, 2, (4, 3), timeout_s=60)


def test_autocast_in_the_functional_form_is_that_of_the_first_call():
    model, (x, _) = mlp(0).float(), [z.float() for z in batch(4)]
    encode, dtypes = wb.gradcache.cached(lambda model, x: model(x)), []
    model.register_forward_hook(lambda _m, _a, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        r, again = encode(model, x)
    r.square().sum().backward()
    again(r)
    assert dtypes == [torch.bfloat16] * 2
    assert all(p.grad is not None for p in model.parameters())


# Mistakes.
def good_loss(a, b):
    return wb.functional.clip_loss(a, b, 1.0)


def good_step(model, x, y):
    return wb.GradCache([model, model], 2, good_loss)(x, y)


MISTAKES = {
    "one input too few": (lambda m, x, y: wb.GradCache([m, m], 2, good_loss)(x), "one input for each of the 2 models"),
    "rows disagree": (
        lambda m, x, y: wb.GradCache([lambda a, b: m(a)], 2, good_loss)([x, y[:3]]),
        r"must have the rows of the batch, got \[6, 3\] rows",
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
    """On the last rank alone: an error on all, gradients as they were, and the next step is right."""
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
def test_mistakes(world_size):
    run_ranks(mistakes_body, world_size, timeout_s=60)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_model_with_a_state_of_its_own_is_found_out(accumulated):
    """In the second chunk's second pass: by then the first chunk's gradient is there, and has to go."""
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
        ({"chunk_sizes": 0}, "chunk_sizes must be a positive integer, rows of a chunk; got 0"),
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
def test_settings(arguments, message):
    given = {"models": [nn.Linear(2, 2)] * 2, "chunk_sizes": 2, "loss_fn": good_loss} | arguments
    with pytest.raises(ValueError, match=message):
        wb.GradCache(**given)


def test_what_the_functional_form_refuses(monkeypatch):
    model, (x, _) = mlp(0), batch(4)
    encode = wb.gradcache.cached(lambda model, x: model(x))
    r, again = encode(model, x)
    with pytest.raises(ValueError, match="has no gradient: call the loss's backward first"):
        again(r)
    with pytest.raises(ValueError, match="gave 1 representations, got back 2"):
        again(r, r)
    r.sum().backward()
    other = torch.zeros_like(r)
    other.grad = r.grad
    with pytest.raises(ValueError, match="is not the one that came with this call"):
        again(other)
    again(r)
    with pytest.raises(ValueError, match="has been gone back through, and its gradient counted"):
        again(r)
    with pytest.raises(ValueError, match="must return a tensor, or a tuple of tensors, got dict"):
        wb.gradcache.cached(lambda: {"x": x})()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="a launcher has started 2 processes"):
        wb.gradcache.gather_input_tensor(good_loss)(x, x)


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wb.GradCache([mlp(0), mlp(1)], 2, Clip(), keep_graphs="auto")(*batch(6))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_step_needs_gradients(context):
    """An evaluation that calls it would leave gradients in `.grad`."""
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
