"""Chunks by a budget of tokens: the gradient is that of the whole padded batch, and no chunk is larger than planned."""

import copy
import random
from collections import UserDict
from functools import cache
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from gradcache_models import (
    Clip,
    assert_all_same,
    batch,
    good_loss,
    gradients_of,
    gradients_of_kept,
    mlp,
    sharded,
)
from gradcache_sentences import LENGTH, Sentences, sentences
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.gradcache.inputs.token_budget import planned, spans_of
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


@cache
def fewest(lengths, tokens):
    """Return the smallest number of chunks of rows with these descending lengths, by trying all."""
    if not lengths:
        return 0
    sizes = (n for n in range(1, len(lengths) + 1) if n == 1 or n * lengths[0] <= tokens)
    return 1 + min(fewest(lengths[n:], tokens) for n in sizes)


def test_plans_have_each_row_once_within_the_budget_in_the_fewest_chunks():
    rng = random.Random(0)
    for _ in range(300):
        rows, tokens = rng.randrange(9), rng.randrange(1, 30)
        most = rng.choice((None, 1, 2, 3))
        left = rng.random() < 0.5
        lengths = [rng.randrange(0, 10) for _ in range(rows)]
        spans = [(10 - n, 10) if left and n else (0, n) for n in lengths]
        plan = planned(spans, tokens, most)
        assert sorted(chain(*(chunk.rows for chunk in plan))) == [*range(rows)]
        for chunk in plan:
            width = chunk.columns.stop - chunk.columns.start
            assert width == max([1, *(lengths[row] for row in chunk.rows)]), "no column without a token"
            assert len(chunk.rows) * width <= tokens or len(chunk.rows) == 1
            assert most is None or len(chunk.rows) <= most
            assert all(chunk.columns.start <= spans[row][0] for row in chunk.rows if lengths[row])
        if most is None and rows:
            assert len(plan) == fewest(tuple(sorted((max(n, 1) for n in lengths), reverse=True)), tokens)


def test_rows_padded_on_both_sides_have_a_window_that_holds_all():
    for _ in range(50):
        mask = sentences(7, seed=_, side="both")["attention_mask"]
        for chunk in wb.gradcache.TokenBudget(12).chunks(mask):
            assert not mask[[*chunk.rows], : chunk.columns.start].any()
            assert not mask[[*chunk.rows], chunk.columns.stop :].any()
            width = chunk.columns.stop - chunk.columns.start
            assert len(chunk.rows) * width <= 12 or len(chunk.rows) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_spans_of_masks(dtype):
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).to(dtype)
    assert spans_of(mask, left=True) == [(1, 4), (0, 0), (0, 1), (4, 5)]
    assert spans_of(mask, left=False) == [(0, 4), (0, 0), (0, 1), (0, 5)]
    assert spans_of(mask[:0], left=True) == []
    assert spans_of(mask[:, :0], left=True) == [(0, 0)] * 4
    (nothing,) = wb.gradcache.TokenBudget(3).chunks(mask[:0])
    assert nothing.rows == ()


FORMS = {
    "keywords": lambda ids, mask: {"input_ids": ids, "attention_mask": mask},
    "UserDict": lambda ids, mask: UserDict(input_ids=ids, attention_mask=mask),
    "one argument": lambda ids, mask: [{"input_ids": ids, "attention_mask": mask}],
    "list": lambda ids, mask: [ids, mask],
    "list and keywords": lambda ids, mask: ([ids], {"attention_mask": mask}),
}


@pytest.mark.parametrize("keep", [0, 2, 1.0, "auto"])
@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("tokens", [1, 12, 20, 1000])
def test_the_gradient_is_that_of_the_whole_batch(tokens, side, keep):
    model, other, loss_fn = Sentences(), mlp(1), Clip()
    features, (y, _) = sentences(13, side=side), batch(13)
    expected = loss_fn(model(**features), other(y))
    expected.backward()
    true = gradients_of(model, other, loss_fn)
    model.shapes.clear()
    cache = wb.GradCache([model, other], [wb.gradcache.TokenBudget(tokens), 3], loss_fn, keep_graphs=keep)
    assert_same(cache(features, y), expected.detach(), relative=1e-12)
    assert_all_same(gradients_of(model, other, loss_fn), true)
    assert all(rows * length <= tokens or rows == 1 for rows, length in model.shapes)
    if side != "both":
        assert max(length for _, length in model.shapes) == LENGTH - 1


@pytest.mark.parametrize("form", FORMS)
def test_inputs_may_have_any_form_with_a_mask(form):
    model, other, loss_fn = Sentences(), mlp(1), Clip()
    features, (y, _) = sentences(7), batch(7)
    loss_fn(model(**features), other(y)).backward()
    true = gradients_of(model, other, loss_fn)
    given = FORMS[form](*features.values())
    encode = (lambda x: model(**x)) if form == "one argument" else model
    budget = wb.gradcache.TokenBudget(12, mask="[1]" if form == "list" else "attention_mask")
    wb.GradCache([encode, other], [budget, 3], loss_fn)(given, y)
    assert_all_same(gradients_of(model, other, loss_fn), true)


def test_only_tokens_are_cut_and_positions_are_cut_with_them():
    """Tensors of rows, of another length, of no rows, and those named in `uncut` keep their columns."""
    features, seen = sentences(6, side="left"), []

    def encode(ids, attention_mask, position_ids, numbers, wide, others, scale):
        seen.append((ids.shape, position_ids.shape, numbers.shape, wide.shape, others.shape))
        rows = numbers.long()
        assert torch.equal(position_ids + torch.zeros_like(ids), rows[:, None] * 100 + ids_at(ids))
        assert torch.equal(wide[:, 0], numbers)
        assert torch.equal(others[:, 3], numbers)
        return model(ids, attention_mask) * scale

    def ids_at(ids):
        return torch.arange(LENGTH - ids.shape[1], LENGTH)[None]

    numbers, model = torch.arange(6.0, dtype=torch.float64), Sentences()
    given = {
        "ids": features["input_ids"],
        "attention_mask": features["attention_mask"],
        "position_ids": numbers.long()[:, None] * 100 + torch.arange(LENGTH),
        "numbers": numbers,
        "wide": numbers[:, None].expand(6, LENGTH + 1),
        "others": numbers[:, None].expand(6, LENGTH),
        "scale": torch.tensor(2.0, dtype=torch.float64),
    }
    other, (y, _) = mlp(1), batch(6)
    good_loss(2 * model(**features), other(y)).backward()
    true = gradients_of(model, other)
    wb.GradCache([encode, other], [wb.gradcache.TokenBudget(14, uncut=["others"]), 2], good_loss)(given, y)
    assert_all_same(gradients_of(model, other), true)
    assert {wide for *_, wide, _ in seen} <= {(n, LENGTH + 1) for n in range(7)}
    assert any(ids[1] < LENGTH - 1 for ids, *_ in seen)

    seen.clear()
    given["position_ids"] = given["ids"]
    whole = wb.gradcache.TokenBudget(100, cut_left=False)
    ((rows, columns),) = whole.chunks(features["attention_mask"])
    assert (rows, columns) == ((0, 1, 2, 3, 4, 5), slice(0, LENGTH))


def test_a_model_whose_positions_count_padding_needs_cut_left_off():
    """Its output depends on the padding before its tokens: without `cut_left=False`, or position_ids, it is another."""

    class Counting(Sentences):
        def forward(self, input_ids, attention_mask):
            places = torch.arange(input_ids.shape[1], dtype=torch.float64)[:, None]
            mask = attention_mask[..., None].double()
            return self.out(((self.words(input_ids) * (1 + places)).tanh() * mask).sum(1))

    model, other, features, (y, _) = Counting(), mlp(1), sentences(9, side="left"), batch(9)
    expected = good_loss(model(**features), other(y)).item()
    for cut_left, right in ((False, True), (True, False)):
        budget = wb.gradcache.TokenBudget(14, cut_left=cut_left)
        found = wb.GradCache([model, other], [budget, 2], good_loss)(features, y).item()
        assert (abs(found - expected) < 1e-12) is right


@pytest.mark.planted
def test_in_the_order_of_the_chunks_the_loss_would_be_another(monkeypatch):
    """The rows come back in the input's order: without that, they are paired with other rows."""
    model, other, features, (y, _) = Sentences(), mlp(1), sentences(9), batch(9)
    expected = good_loss(model(**features), other(y))
    expected.backward()
    true = gradients_of(model, other)
    step = wb.GradCache([model, other], [wb.gradcache.TokenBudget(14), 3], good_loss)
    assert_same(step(features, y), expected.detach(), relative=1e-12)
    assert_all_same(gradients_of(model, other), true)

    def one_after_another(parts, counts):
        starts = [sum(counts[:k]) for k in range(len(parts))]
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]

    monkeypatch.setattr("wholebatch.gradcache.join.numbers_of_rows", one_after_another)
    assert abs(step(features, y) - expected) > 1e-3
    wrong = gradients_of(model, other)
    assert max(((a - b).norm() / b.norm()).item() for a, b in zip(wrong, true, strict=True)) > 0.01


@pytest.mark.planted
def test_gradients_of_other_rows_would_be_wrong():
    """A loss that weighs rows differently shows the order of gradients, apart from that of values."""
    model, features, weights = Sentences(), sentences(9), torch.arange(1.0, 10, dtype=torch.float64)[:, None]
    (model(**features) * weights).square().sum().backward()
    true = gradients_of(model)
    step = wb.GradCache([model], wb.gradcache.TokenBudget(14), lambda x: (x * weights).square().sum())
    step(features)
    assert_all_same(gradients_of(model), true)
    order = torch.tensor(
        [row for chunk in wb.gradcache.TokenBudget(14).chunks(features["attention_mask"]) for row in chunk.rows]
    )
    (model(**features) * weights[order]).square().sum().backward()
    assert max(((a - b).norm() / b.norm()).item() for a, b in zip(gradients_of(model), true, strict=True)) > 0.01


@pytest.mark.parametrize("keep", [0, 1, 1.0])
def test_random_numbers_are_replayed(keep):
    model, features = Sentences(), sentences(9)
    model.inner.append(nn.Dropout(0.4))
    budget = wb.gradcache.TokenBudget(14)
    torch.manual_seed(3)
    parts = [[*chunk.rows] for chunk in budget.chunks(features["attention_mask"])]
    cut = [chunk.columns for chunk in budget.chunks(features["attention_mask"])]
    found = torch.cat(
        [model(*(x[rows][:, at] for x in features.values())) for rows, at in zip(parts, cut, strict=True)]
    )
    found[torch.tensor([*chain(*parts)]).argsort()].logsumexp(0).square().sum().backward()
    true = gradients_of(model)
    torch.manual_seed(3)
    wb.GradCache([model], budget, lambda x: x.logsumexp(0).square().sum(), keep_graphs=keep)(features)
    assert_all_same(gradients_of(model), true)


def test_a_split_function_may_give_rows_in_any_order():
    model, other, features, (y, _) = Sentences(), mlp(1), sentences(7), batch(7)
    expected = good_loss(model(**features), other(y))
    expected.backward()
    true = gradients_of(model, other)

    def odd_ones_first(x, size):
        order = torch.arange(7).roll(3).tolist()
        rows = [order[k : k + size] for k in range(0, 7, size)]
        if isinstance(x, dict):
            return [wb.gradcache.InputChunk({name: z[at] for name, z in x.items()}, at) for at in rows]
        return [wb.gradcache.InputChunk(x[at], at) for at in rows]

    for size in (2, 3, 7):
        loss = wb.GradCache([model, other], size, good_loss, odd_ones_first)(features, y)
        assert_same(loss, expected.detach(), relative=1e-12)
        assert_all_same(gradients_of(model, other), true)

    def by_budget(x, budget):
        if not isinstance(x, dict):
            return [*x.split(budget)]
        plan = budget.chunks(x["attention_mask"])
        return [
            wb.gradcache.InputChunk({name: z[[*rows]][:, columns] for name, z in x.items()}, rows)
            for rows, columns in plan
        ]

    wb.GradCache([model, other], [wb.gradcache.TokenBudget(12), 3], good_loss, by_budget)(features, y)
    assert_all_same(gradients_of(model, other), true)


def ranks_body(counts, engine, keep, side):
    rank, total = dist.get_rank(), sum(counts)
    rows, features, (y, _) = Partition(counts).rows(rank), sentences(total, side=side), batch(total)
    plain, other, loss_fn = Sentences(), mlp(1), Clip()
    alone, alone_other, single = copy.deepcopy((plain, other, loss_fn))
    expected = wb.reference.clip_loss(
        *(normalize(z, dim=1) for z in (alone(**features), alone_other(y))), single.log_scale.exp()
    )
    expected.backward()
    true = [gradients_of_kept(alone), gradients_of_kept(alone_other), gradients_of_kept(single)]
    if engine == "ddp":
        models, of_loss = [DistributedDataParallel(plain), DistributedDataParallel(other)], loss_fn
        of_loss = DistributedDataParallel(loss_fn)
    else:
        models = [sharded(plain, plain.inner, plain.out), sharded(other, other[0])]
        of_loss = DistributedDataParallel(loss_fn)
    plain.shapes.clear()
    step = wb.GradCache(models, [wb.gradcache.TokenBudget(12), 2], of_loss, keep_graphs=keep)
    local = {name: x[rows] for name, x in features.items()}
    for _ in range(2):
        loss = step(local, y[rows])
        assert_same(loss, expected.detach(), relative=1e-12)
        found = [gradients_of(module) for module in (plain, other, loss_fn)]
        for got, of_all in zip(found, true, strict=True):
            assert_all_same([z.full_tensor() if hasattr(z, "full_tensor") else z for z in got], of_all)
    assert all(n * length <= 12 or n == 1 for n, length in plain.shapes)
    return len(plain.shapes)


@pytest.mark.parametrize(
    ("counts", "engine", "keep", "side"),
    [
        ((11,), "ddp", 1, "right"),
        ((8, 5), "ddp", 0, "left"),
        ((2, 11), "ddp", 1.0, "right"),
        ((9, 0, 4), "ddp", 2, "both"),
        ((11,), "fsdp", 0, "right"),
        ((8, 5), "fsdp", 1, "right"),
        ((2, 11), "fsdp", 0, "left"),
        ((9, 0, 4), "fsdp", 0, "right"),
    ],
    ids=str,
)
def test_on_ranks_with_uneven_and_no_rows(counts, engine, keep, side):
    calls = run_ranks(ranks_body, len(counts), counts, engine, keep, side, timeout_s=120)
    if engine == "fsdp":
        assert len({*calls}) == 1, "passes are collective: all ranks make the same number"


def step_with(budget, features):
    return wb.GradCache([Sentences()], budget, lambda x: x.sum())(features)


def rows_named(*chunks):
    """Return a step whose split function returns such chunks of two rows: their numbers, or None for no numbers."""

    def split(x, size):
        return [x[:size] if rows is None else wb.gradcache.InputChunk(x[:size], rows) for rows in chunks]

    return wb.GradCache([mlp(0)], 2, lambda x: x.sum(), split)(batch(4)[0])


TOKENS = wb.gradcache.TokenBudget(9)
MISTAKES = {
    "no mask": (
        lambda: step_with(TOKENS, {"input_ids": sentences(6)["input_ids"]}),
        r"the input of model 0 \(Sentences\) must hold one tensor of this name, got 0: its tensors are input_ids\. ",
    ),
    "two masks": (
        lambda: step_with(TOKENS, {"a": sentences(6), "b": sentences(6)}),
        r"must hold one tensor of this name, got 2: its tensors are a\.input_ids, a\.attention_mask, b\.",
    ),
    "no name": (lambda: step_with(TOKENS, sentences(6)["input_ids"]), "got 0: its tensors are without a name"),
    "shape of the mask": (
        lambda: step_with(TOKENS, sentences(6) | {"attention_mask": torch.ones(6)}),
        r"'attention_mask' of the input of model 0 \(Sentences\) must have shape \(rows, length\).* got shape \(6,\)",
    ),
    "uncut": (
        lambda: step_with(wb.gradcache.TokenBudget(9, uncut=["labels"]), sentences(6)),
        "uncut of a TokenBudget names 'labels', and the input of model 0 .* has only input_ids, attention_mask",
    ),
    "texts": (
        lambda: step_with(wb.gradcache.TokenBudget(99), sentences(2) | {"texts": ["a", "b"]}),
        "holds a list of 2 things that are no tensors",
    ),
    "rows left out": (lambda: rows_named([0, 1]), r"each of its 4 rows once, with numbers from 0; got rows \[0, 1\]"),
    "rows twice": (lambda: rows_named([0, 1], [0, 1]), r"once, with numbers from 0; got rows \[0, 0, 1, 1\]"),
    "some without numbers": (lambda: rows_named([0, 1], None), "into 1 InputChunks and 1 other chunks: either all"),
    "other rows": (lambda: rows_named([0], [1], [2], [3]), "got 1 rows and returned 2 as representation 0"),
}


def mistakes_body():
    """The last rank makes a mistake, and all raise."""
    for call, message in MISTAKES.values():
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        with pytest.raises(ValueError, match=message):
            call() if last else step_with(TOKENS, sentences(4))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wrong_input_on_one_rank_raises_on_all_ranks(world_size):
    run_ranks(mistakes_body, world_size, timeout_s=60)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wb.gradcache.TokenBudget(0), "tokens must be a positive integer, rows times columns .* got 0"),
        (lambda: wb.gradcache.TokenBudget(8, max_rows=0), "max_rows must be a positive integer"),
        (lambda: wb.gradcache.TokenBudget(8, mask=None), "mask must be the name of a tensor in the input, got None"),
        (lambda: wb.gradcache.TokenBudget(8, cut_left=1), "cut_left must be True or False, got 1"),
        (lambda: wb.gradcache.TokenBudget(8, uncut="labels"), "uncut must be a list of names of tensors, got 'labels'"),
        (lambda: wb.gradcache.TokenBudget(8).chunks([[1, 0]]), r"mask must be a tensor of shape \(rows, length\)"),
        (
            lambda: wb.gradcache.InputChunk(None, [0, 0]),
            r"rows must be integers of at least 0, each once; got \[0, 0\]",
        ),
        (
            lambda: wb.GradCache([mlp(0)], wb.gradcache.TokenBudget, good_loss),
            r"chunk_sizes must be a positive integer, rows of a chunk \(or a TokenBudget\); got <class",
        ),
    ],
)
def test_a_wrong_setting_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
