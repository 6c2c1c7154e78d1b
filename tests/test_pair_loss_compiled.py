"""Declared losses with compiled tiles equal those without, in value and every gradient, and do without a compiler."""

import copy
import re
import shutil
import types
import warnings

import declared
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from pair_grammar import drawn
from pair_losses import DECLARATIONS, Batch, batch_for, cut, gradients, part
from test_pair_loss import distance
from torch._inductor.utils import fresh_cache, run_and_get_code

import wholebatch as wb
from wholebatch.pair_loss import compiled
from wholebatch.testing import run_ranks

COUNTS = {1: (13,), 2: (9, 4)}
# Tracing takes most of the time, on every rank. Each declaration is traced on one number of ranks, and on two ranks
# some of each kind: partners, own candidates, one triangle of a symmetric matrix, several similarities.
NAMES = {1: declared.NAMES, 2: ("clip", "info_nce_with_hard_negatives", "sup_con", "guided")}
SEEDS = {1: [seed for seed in range(24) if seed % 3], 2: range(0, 24, 3)}
RAGGED = {"memory": 4000}  # bytes: tiles of a few rows
PAIR_LOSS = wb.PairLoss


def without_generating_code(graph, **options):
    """Trace as ever, but run the graph in eager PyTorch: code takes seconds for each."""
    return graph


def is_compiled(loss_fn):
    kernels = loss_fn.declaration.kernels
    assert not kernels.failure, kernels.failure
    return len(kernels.by_key)


def declared_both(patch, name, data, options):
    """Return a declared loss of the library's without and with compiled tiles, and the second's module."""
    found = []

    def made(*given, **more):
        found.append(PAIR_LOSS(*given, **more, compile_tiles=bool(results)))
        return found[-1]

    patch.setattr(wb, "PairLoss", made)
    results = []
    for _ in range(2):
        results.append(declared.declared_and_given(name, data, options)[0])
    return *results, found[-1]


def of_rank(world):
    """Return the differences of declared losses on this rank, and the results of drawn ones."""
    counts, rank = COUNTS[world], dist.get_rank()
    differences, results = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", without_generating_code)
        for name in NAMES[world]:
            data = declared.data_of(counts, rank)
            leaves = [x for x in data.values() if isinstance(x, torch.Tensor)]
            *losses, loss_fn = declared_both(patch, name, data, RAGGED)
            grads = [torch.autograd.grad(loss, leaves, allow_unused=True) for loss in losses]
            pairs = [losses, *((x, y) for x, y in zip(*grads, strict=True) if x is not None)]
            differences[name] = max(float((x - y).detach().abs().max()) for x, y in pairs)
            assert is_compiled(loss_fn)
        patch.setattr(wb, "PairLoss", PAIR_LOSS)
        for seed in SEEDS[world]:
            declaration, batch = drawn(seed, sum(counts))
            at = cut(counts, rank)
            loss_fn = wb.PairLoss(**declaration, **RAGGED, compile_tiles=True)
            results.append(gradients(loss_fn, part(batch, at, at)))
            is_compiled(loss_fn)
    return differences, results


@pytest.mark.parametrize("world", [1, 2])
def test_compiled_tiles_have_the_same_values_and_gradients(world):
    counts = COUNTS[world]
    found = run_ranks(of_rank, world, world, timeout_s=400)
    for differences, _ in found:
        assert {name: error for name, error in differences.items() if not error < 1e-10} == {}
    wrong = []
    for at, seed in enumerate(SEEDS[world]):
        declaration, batch = drawn(seed, sum(counts))
        expected = gradients(wb.PairLoss(**declaration).reference, batch)
        error = distance([results[at] for _, results in found], batch, expected, counts, "mean")
        if not error < 1e-10:
            wrong.append((seed, error))
    assert not wrong


# With generated code, which needs a compiler for C++.


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("sup_con", {"symmetric": True}, torch.float32),
        ("sup_con", {"symmetric": True}, torch.float64),
        ("weighted_mean", {}, torch.float64),
    ],
    ids=str,
)
def test_generated_code_serves_ragged_tiles_without_compiling_again(name, options, dtype):
    counters = torch._dynamo.utils.counters["stats"]
    loss_fn = DECLARATIONS[name](**options, memory=40_000, compile_tiles=True)
    graphs = counters["unique_graphs"]
    for rows in (70, 70, 41, 103, 17, 5, 2, 1):
        batch = batch_for(name, rows, rows, seed=rows, dtype=dtype)
        found = gradients(loss_fn, batch)
        expected = gradients(DECLARATIONS[name](**options).reference, batch)
        assert distance([found], batch, expected, (rows,), "mean") < (1e-10 if dtype == torch.float64 else 2e-4), rows
    assert is_compiled(loss_fn) == 2
    assert counters["unique_graphs"] - graphs == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", ["clip", "sup_con", "weighted_mean"])
def test_a_direction_is_at_most_three_generated_functions(name):
    loss_fn = DECLARATIONS[name](memory=40_000, compile_tiles=True)
    with fresh_cache():  # which would hold the code of earlier tests
        _, codes = run_and_get_code(lambda: gradients(loss_fn, batch_for(name, 70, 70, dtype=torch.float32)))
    assert is_compiled(loss_fn) == len(codes) == 2
    assert all(1 <= len(re.findall(r"^cpp_fused\w* = ", code, re.MULTILINE)) <= 3 for code in codes)


def sums(score, **options):
    return wb.PairLoss({"a": wb.terms.Sum(score)}, lambda r, x, p: r.a, **options)


captured = types.SimpleNamespace(power=2)


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (sums(lambda s, x, y, p: s**2), 2),
        (sums(lambda s, x, y, p: s**captured.power), 0),  # which may change while the fingerprint stays
        (sums(lambda s, x, y, p: s**2, compile_tiles=False), 0),
        (wb.PairLoss({"a": wb.terms.Max(ties="split")}, lambda r, x, p: r.a), 0),
        (wb.PairLoss({"a": wb.terms.LogSumExp()}, lambda r, x, p: r.a), 0),  # takes the softmax sweep
    ],
)
def test_on_a_gpu_tiles_without_a_faster_way_are_compiled(quick, monkeypatch, loss_fn, expected):
    monkeypatch.setattr("wholebatch.pair_loss.declaration._COMPILES_ON", {"cpu"})  # which stands for the GPU
    batch = Batch(*(torch.randn(9, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)))
    found = gradients(loss_fn, batch)
    assert is_compiled(loss_fn) == expected
    assert distance([found], batch, gradients(loss_fn.reference, batch), (9,), "mean") < 1e-10


def test_modes_compile_once_each(monkeypatch):
    compile_, counters = torch.compile, torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr(torch, "compile", lambda graph, **options: compile_(graph, backend="aot_eager", **options))
    loss_fn, given = DECLARATIONS["sup_con"](memory=10_000, compile_tiles=True), batch_for("sup_con", 50, 50)
    x, more = given.x.detach(), {"x_data": given.x_data, "parameters": given.parameters}
    graphs = counters["unique_graphs"]
    for _ in range(2):
        with torch.inference_mode():
            found = [loss_fn(x, **more)]
        with torch.no_grad():
            found.append(loss_fn(x, **more))
        found.append(loss_fn(x.clone().requires_grad_(), **more))
        found[-1].backward()
        assert torch.allclose(torch.stack(found).detach(), loss_fn.reference(x, **more), 1e-12)
    assert is_compiled(loss_fn) == 3
    assert counters["unique_graphs"] - graphs == 3


def same_label(x, y):
    return x.label == y.label


def soft_margin(**options):
    terms = {"all": wb.terms.Sum(lambda s, x, y, p: (p.margin - s).relu() * (s.detach() > 0), where=same_label)}
    return wb.PairLoss(terms, lambda r, x, p: r.all, **options)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(torch, "compile", without_generating_code)


def test_a_number_of_python_may_change_between_calls(quick):
    loss_fn = soft_margin(compile_tiles=True)
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    label = torch.arange(9) % 2
    for margin in (0.1, 0.5, 2.0):
        given = {"x_data": {"label": label}, "parameters": {"margin": margin}}
        found, expected = loss_fn(x, **given), loss_fn.reference(x, **given)
        assert torch.allclose(found, expected, 1e-12, 1e-12)
    found.backward()
    assert is_compiled(loss_fn) == 2


class Schedule:
    """A score with an attribute that changes; nested, so that no fingerprint shows it."""

    def __init__(self):
        self.numbers = {"margin": [1.0]}

    def __call__(self, s, x, y, p):
        return (self.numbers["margin"][0] - s).relu()


@pytest.mark.planted
def test_a_stale_function_is_found_by_a_few_entries(quick):
    score = Schedule()
    loss_fn = wb.PairLoss({"all": wb.terms.Sum(score)}, lambda r, x, p: r.all, compile_tiles=True)
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(loss_fn(x), loss_fn.reference(x), 1e-12, 1e-12)
    score.numbers["margin"][0] = 3.0
    with pytest.warns(UserWarning, match="Python variables that change"):
        found = loss_fn(x)
    assert torch.allclose(found, loss_fn.reference(x), 1e-12, 1e-12)


def test_functions_that_look_at_values_are_computed_without(quick):
    def score(s, x, y, p):
        return s * 2 if bool((x.label == 1).any()) else s * 2.0

    loss_fn = wb.PairLoss({"all": wb.terms.Sum(score)}, lambda r, x, p: r.all, compile_tiles=True)
    x, data = torch.randn(9, 4, requires_grad=True), {"label": torch.arange(9)}
    with pytest.warns(UserWarning, match="without compiled functions"):
        found = loss_fn(x, x_data=data)
    found.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert torch.allclose(loss_fn(x, x_data=data), loss_fn.reference(x, x_data=data))


def test_copies_compile_for_themselves(quick):
    loss_fn = DECLARATIONS["clip"](compile_tiles=True)
    batch = batch_for("clip", 9, 9)
    found = gradients(loss_fn, batch)
    assert is_compiled(loss_fn) == 2
    other = copy.deepcopy(loss_fn)
    assert is_compiled(other) == 0
    assert distance([gradients(other, batch)], batch, found, (9,), "mean") < 1e-12


def test_kinds_of_calls_are_counted(quick, monkeypatch):
    monkeypatch.setattr(compiled, "_MOST", 4)
    loss_fn = soft_margin(compile_tiles=True)
    x, data = torch.randn(9, 4, requires_grad=True), {"label": torch.arange(9) % 2}
    for step in range(4):
        loss_fn(x, x_data=data, parameters={"margin": step})
    with pytest.warns(UserWarning, match="2 kinds of calls"):
        loss_fn(x, x_data=data, parameters={"margin": 4})


def refuse(graph, **options):
    raise RuntimeError("No working C++ compiler found")


def refused_of_rank(rank_without):
    """Return results of two steps and what was said, where one rank has no compiler."""
    said, results = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", refuse if dist.get_rank() == rank_without else without_generating_code)
        loss_fn = DECLARATIONS["clip"](compile_tiles=True)
        for _ in range(3):
            batch = batch_for("clip", 8, 8)
            at = cut((4, 4), dist.get_rank())
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                results.append(gradients(loss_fn, part(batch, at, at)))
            said.append([str(of.message) for of in seen if "PairLoss" in str(of.message)])
    return results, said, loss_fn.declaration.kernels.failure


@pytest.mark.parametrize("rank_without", [0, 1])
def test_all_ranks_hear_of_one_without_a_compiler(rank_without):
    found = run_ranks(refused_of_rank, 2, rank_without)
    batch = batch_for("clip", 8, 8)
    expected = gradients(DECLARATIONS["clip"]().reference, batch)
    for step in range(3):
        assert distance([results[step] for results, *_ in found], batch, expected, (4, 4), "mean") < 1e-10
    for _, (first, second, third), failure in found:
        assert (first, third) == ([], [])
        assert len(second) == 1
        assert "No working C++ compiler" in second[0]
        assert "No working C++ compiler" in failure


def test_one_process_hears_at_once(monkeypatch):
    monkeypatch.setattr(torch, "compile", refuse)
    loss_fn, batch = DECLARATIONS["clip"](compile_tiles=True), batch_for("clip", 8, 8)
    with pytest.warns(UserWarning, match=r"No working C\+\+ compiler"):
        found = gradients(loss_fn, batch)
    assert distance([found], batch, gradients(loss_fn.reference, batch), (8,), "mean") < 1e-12


class Margin(torch.nn.Module):
    """A module whose loss reads numbers of its own."""

    def __init__(self):
        super().__init__()
        self.margin, self.nested = 0.1, types.SimpleNamespace(margin=0.1)
        terms = {"t": wb.terms.Mean(lambda s, x, y, p: (s + self.margin + self.nested.margin).relu(), where=different)}
        self.loss_fn = wb.PairLoss(terms, lambda r, x, p: r.t, compile_tiles=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_number_that_a_function_finds_elsewhere_may_change():
    """The first entries of a tile are all masked if labels are sorted: a few of these would show nothing."""
    x, labels = torch.randn(40, 5, dtype=torch.float64), torch.arange(40) // 20
    module = Margin()
    for owner in (module, module.nested, module):
        owner.margin += 0.3
        expected = module.loss_fn.reference(x, x_data={"label": labels})
        assert torch.isclose(module.loss_fn(x, x_data={"label": labels}), expected, rtol=1e-12)
    assert not module.loss_fn.declaration.kernels.failure


def different(x, y):
    return x.label != y.label
