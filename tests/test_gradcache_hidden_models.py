"""Gradient caching finds the models and engines behind any function that calls them."""

import copy
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ddp import counting
from gradcache_models import (
    Clip,
    assert_all_same,
    batch,
    dense_gradients,
    good_loss,
    gradients_of,
    mlp,
    reductions,
    sharded,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

HIDDEN = {}


class Trainer:
    """An object that holds a model but is not a module."""

    def __init__(self, model):
        self.model = model

    def encode(self, z):
        return self.model(z)

    def scaled(self, z, by):
        return by * self.model(z)


class Hiding(nn.Module):
    """A module that calls a model which it does not register."""

    def __init__(self, model):
        super().__init__()
        self.models, self.last = [model], nn.Identity()

    def forward(self, z):
        return self.last(self.models[0](z))


def by_global(z):
    return HIDDEN["model"](z)


def functions_that_call(model):
    """Return functions that call a model without holding it."""
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
        "a module that does not register it": Hiding(model),
    }


def test_models_hidden_by_functions_are_found():
    """Running averages count once for every function that calls the model."""
    loss_fn, (x, y) = Clip(), batch(8)
    for name in functions_that_call(None):
        model = mlp(0, nn.BatchNorm1d(8))
        plain = copy.deepcopy(model)
        loss_fn(*(torch.cat([plain(part) for part in z.split(4)]) for z in (x, y))).backward()
        true, encode = gradients_of(plain), functions_that_call(model)[name]
        wb.GradCache([encode, encode], 4, loss_fn)(x, y)
        assert_all_same(gradients_of(model), true)
        assert int(model[2].num_batches_tracked) == 4, name
        r, again = wb.gradcache.cached(encode)(x)
        r.sum().backward()
        again(r)
        assert int(model[2].num_batches_tracked) == 5, name


def test_modules_that_only_later_chunks_call_are_found():
    """Calls inside of a module that an earlier chunk has called are not observed; other calls are."""
    trunk, models = nn.Sequential(mlp(0, nn.BatchNorm1d(8))), [nn.Sequential(nn.BatchNorm1d(4).double()) for _ in "ab"]
    calls = [0]

    def encode(z):
        calls[0] += 1
        return models[(calls[0] - 1) % 4 > 0](trunk(z))

    (x, _), plain = batch(8), copy.deepcopy((trunk, models))
    torch.cat([plain[1][k > 0](plain[0](part)) for k, part in enumerate(x.split(2))]).square().sum().backward()
    wb.GradCache([encode], 2, lambda r: r.square().sum())(x)
    for found, expected in zip([trunk, *models], [plain[0], *plain[1]], strict=True):
        assert_all_same(gradients_of(found), gradients_of(expected))
        for (name, buffer), other in zip(found.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(buffer, other), name


def test_modules_compiled_in_place_are_exact():
    """Hooks do not see the inner calls of such modules."""
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
    for name in functions_that_call(None):
        plain = mlp(0)
        engine = DistributedDataParallel(plain)
        reduced, encode = counting(engine), functions_that_call(engine)[name]
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

        if isinstance(encode, Hiding):
            continue  # ranks with different numbers of chunks must see FSDP before the call
        plain = mlp(0)
        encode = functions_that_call(sharded(plain, plain[0], plain[2]))[name]
        with reductions() as reduced:
            wb.GradCache([encode, encode], 2, good_loss)(x[rows], y[rows])
        assert_all_same([p.grad.full_tensor() for p in plain.parameters()], true)
        assert reduced == [2], name
    return True


@pytest.mark.parametrize("counts", [(4, 4), (6, 2)], ids=str)
def test_engines_hidden_by_functions_are_found(counts):
    run_ranks(hidden_body, 2, counts, timeout_s=90)


def test_passes_found_to_be_collective_raise_on_all_ranks():
    """If ranks have different numbers of chunks for a model that only the call reveals, all ranks raise."""
    run_ranks(unforeseen_body, 2, timeout_s=60)


def unforeseen_body():
    plain = mlp(0)
    HIDDEN["deep"] = sharded(plain, plain[0], plain[2])
    x, y = batch(2 + 4 * dist.get_rank())

    def encode(z):
        return getattr(sys.modules[__name__], "HID" + "DEN")["deep"](z)

    with pytest.raises(ValueError, match="collective, which could not be seen before the call"):
        wb.GradCache([encode, encode], 2, good_loss)(x, y)


class Branches(nn.Module):
    """Call a module outside of it for some inputs alone."""

    def __init__(self, outside):
        super().__init__()
        self.inner, self.outside = nn.Linear(4, 3), [outside]

    def forward(self, x):
        h = self.inner(x)
        return self.outside[0](h) if x[0, 0] > 5 else h


@pytest.mark.parametrize("large", [(0,), (2, 3)])
def test_buffers_of_a_module_that_some_chunks_call_are_counted_once(large):
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    x[[2 * chunk for chunk in large], 0] = 9.0
    norms = []
    for cached in (True, False):
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(3)
        model = Branches(norm)
        if cached:
            wb.GradCache([model], 2, lambda reps: reps.square().sum())(x)
        else:
            torch.cat([model(chunk) for chunk in x.split(2)]).square().sum().backward()
        norms.append(norm)
    one, other = norms
    assert one.num_batches_tracked == other.num_batches_tracked == len(large)
    torch.testing.assert_close(one.running_mean, other.running_mean)
    torch.testing.assert_close(one.weight.grad, other.weight.grad)


class Draws(nn.Module):
    """Leave the generator as it was, or in a state of its own, after numbers were drawn."""

    def __init__(self, seed):
        super().__init__()
        self.inner, self.seed = nn.Linear(4, 3), seed

    def forward(self, x):
        if self.seed is not None:
            torch.manual_seed(self.seed)
            return self.inner(x * torch.rand_like(x))
        with torch.random.fork_rng():
            return self.inner(x * torch.rand_like(x))


@pytest.mark.parametrize("seed", [None, 42])
def test_generators_that_a_model_resets_are_those_of_a_plain_step(seed):
    x, results = torch.randn(8, 4), []
    for cached in (True, False):
        torch.manual_seed(0)
        model = Draws(seed)

        def loss(reps):
            torch.rand(3)
            return reps.square().sum()

        if cached:
            wb.GradCache([model], 2, loss)(x)
        else:
            loss(torch.cat([model(chunk) for chunk in x.split(2)])).backward()
        results.append((model.inner.weight.grad, torch.rand(1)))
    torch.testing.assert_close(*results)
