"""The cached gradient is that of the whole batch, for any chunks and any form of the inputs."""

import copy
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from ddp import counting
from gradcache_models import (
    OUT,
    Clip,
    D,
    TwoParts,
    assert_all_same,
    batch,
    good_loss,
    gradients_of,
    gradients_of_kept,
    mlp,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.gradcache.inputs.parts import Part, split_tree
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

KEEP = [0, 2, 0.5, 1.0, "auto"]


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
    """An encoder that takes its input in any form."""

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
def test_inputs_may_have_any_form(form):
    model, (a, b), (y, _) = Many(), batch(7), batch(7, seed=1)
    other, loss_fn = mlp(1), Clip()
    loss_fn(model(a, b).pooled, other(y)).backward()
    true = gradients_of(model, other, loss_fn)
    cache = wb.GradCache([model, other], 3, loss_fn, get_rep_fn=lambda out: getattr(out, "pooled", out))
    cache(FORMS[form](a, b), y)
    assert_all_same(gradients_of(model, other, loss_fn), true)


class Both(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Features(dict):
    """A dict with other arguments than dict's, and attributes for its items."""

    def __init__(self, *, a, b):
        super().__init__(a=a, b=b)

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


CONTAINERS = {
    Both: Both,
    Features: lambda a, b: Features(a=a, b=b),
    OrderedDict: lambda a, b: OrderedDict(b=b, a=a),
    defaultdict: lambda a, b: defaultdict(list, a=a, b=b),
    UserDict: lambda a, b: UserDict(a=a, b=b),
    MappingProxyType: lambda a, b: MappingProxyType({"a": a, "b": b}),
    tuple: lambda a, b: (a, b),
    list: lambda a, b: [a, b],
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", CONTAINERS, ids=lambda kind: kind.__name__)
def test_chunks_have_the_containers_of_the_input(kind, nested):
    whole = CONTAINERS[kind](*batch(5))
    values = [*(whole.values() if isinstance(whole, Mapping) else whole)]
    tree = [{"x": whole}] if nested else whole
    parts = [part.tree for part in split_tree(tree, 2, "the input")]
    cut = [part[0]["x"] if nested else part for part in parts]
    assert {type(part) for part in cut} == {kind}
    if isinstance(whole, Mapping):
        assert all([*part] == [*whole] for part in cut), "the order of the keys"
        cut = [[*part.values()] for part in cut]
    assert [len(part[0]) for part in cut] == [2, 2, 1]
    for number, value in enumerate(values):
        assert torch.equal(torch.cat([part[number] for part in cut]), value)
    empty = Part(tree).emptied().tree
    assert type(empty[0]["x"] if nested else empty) is kind
    assert Part(tree).may_be_empty


def test_a_model_reads_the_attributes_of_its_input():
    """A NamedTuple and a dict with attributes stay what they are inside of a list, in the step of a model."""
    model, other, loss_fn, (a, b), (y, _) = mlp(0), mlp(1), Clip(), batch(7), batch(7, seed=1)
    loss_fn(model(a + 2 * b), other(y)).backward()
    true = gradients_of(model, other, loss_fn)
    for whole in (Both(a, b), Features(a=a, b=b)):
        wb.GradCache([lambda x: model(x.a + 2 * x.b), other], 3, loss_fn)([whole], y)
        assert_all_same(gradients_of(model, other, loss_fn), true)


def test_a_model_may_write_into_its_input():
    """The second pass does not see written entries, and inputs keep their contents (sentence-transformers write)."""
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


def test_the_caller_may_give_a_split_function():
    """Inputs are lists of texts, which have no tensor to count rows by."""
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


def test_accumulation_and_clipping():
    """Two cached steps accumulate, and earlier gradients are kept."""
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


def naive_step(model, size, loss_fn, x, y):
    """Run two passes without replay and without holding the engine."""
    with torch.no_grad():
        found = [torch.cat([model(part) for part in z.split(size)]).requires_grad_() for z in (x, y)]
    loss_fn(*found).backward()
    for z, r in zip((x, y), found, strict=True):
        for part, grad in zip(z.split(size), r.grad.split(size), strict=True):
            model(part).backward(grad)


def away(found, true):
    return max(((z - t).norm() / t.norm()).item() for z, t in zip(found, true, strict=True))


@pytest.mark.planted
def test_two_passes_without_replay_are_wrong():
    """Naive steps are wrong with dropout, move buffers twice, and are right only if nothing must be replayed.

    The sum of the chunks' losses is not the batch's loss.
    """
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


def test_gradients_of_free_parameters_are_put_back():
    """These are a parameter beside a module, and modules that only later chunks call."""
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
    """Without gradients PyTorch uses a faster path, which returns zeros for masked rows."""
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


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wb.GradCache([mlp(0), mlp(1)], 2, Clip(), keep_graphs="auto")(*batch(6))
