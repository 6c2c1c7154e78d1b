"""Declared losses that take the softmax sweep: which do, and that values and gradients stay those of a dense matrix."""

import functools
import os
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lowered_losses import LOSSES, batch_of, different, other, others_of_class, same, score, siglip, sup_con
from pair_losses import Batch, call, cut, gradients, part
from torch.nn.functional import softplus
from torch.utils.flop_counter import FlopCounterMode

import wholebatch as wb
from wholebatch.pair_loss import call as calls
from wholebatch.pair_loss.function_checks import fixed_tile
from wholebatch.pair_loss.lowering import lowered
from wholebatch.pair_loss.masks import EVERY, ITSELF, OTHER, Compared, condition_of
from wholebatch.pair_loss.module import arguments_of
from wholebatch.testing import run_ranks

SAME = frozenset({Compared("label", True)})
DIFFERENT = frozenset({Compared("label", False)})


@pytest.mark.parametrize(
    ("mask", "condition"),
    [
        (None, EVERY),
        (other, OTHER),
        (lambda x, y: y.index != x.index, OTHER),
        (lambda x, y: ~(x.index == y.index), OTHER),
        (lambda x, y: torch.ne(x.index, y.index), OTHER),
        (lambda x, y: x.index == y.index, ITSELF),
        (same, SAME),
        (lambda x, y: torch.logical_not(torch.eq(x.label, y.label)), DIFFERENT),
        (others_of_class, SAME | OTHER),
        (lambda x, y: torch.logical_and(other(x, y), same(x, y)), SAME | OTHER),
        (wb.terms.other, OTHER),
        (wb.terms.equal("label"), SAME),
        (wb.terms.unequal("label"), DIFFERENT),
    ],
)
def test_masks_are_recognized_by_their_operations(mask, condition):
    assert _condition(mask) == condition


@pytest.mark.parametrize(
    "mask",
    [
        lambda x, y: x.label >= y.label,
        lambda x, y: same(x, y) | other(x, y),
        lambda x, y: x.label == y.domain,
        lambda x, y: x.label == x.label,
        lambda x, y: x.label + 1 == y.label,
        lambda x, y: ~(same(x, y) & other(x, y)),
        lambda x, y: same(x, y) & different(x, y),
        lambda x, y: x.weight == y.weight,
        lambda x, y: other(x, y).logical_and_(same(x, y)),
        lambda x, y: other(x, y) if bool((x.label == y.label).any()) else same(x, y),
        lambda x, y: other(x, y).clone(),
        lambda x, y: torch.eq(x.index, y.index, out=same(x, y)),
        lambda x, y, s: s > 0,
    ],
)
def test_other_masks_are_not(mask):
    assert _condition(mask) is None


def _condition(mask):
    numbers = {"label": torch.zeros(1, dtype=torch.int64), "domain": torch.zeros(1, dtype=torch.int64)}
    numbers["weight"] = torch.zeros(1)
    return condition_of(wb.terms.LogSumExp(where=mask), fixed_tile({"": "dot"}, (numbers, numbers), {}))


OPTIONS = [{"exchange": "gather"}, {"exchange": "ring"}, {"exchange": "gather", "sync": None, "memory": "flat"}]


def columns_of(name, counts):
    """Return the columns of each rank; where there are more of them than rows, the last rank has those."""
    return (*counts[:-1], counts[-1] + 2) if name in ("classes", "smoothed") else counts


def of_rank(counts):
    """Return values and gradients for each loss and option, and how many took the sweep."""
    found, taken, reduce = [], [], calls.reduce
    calls.reduce = lambda *arguments: taken.append(arguments) or reduce(*arguments)
    try:
        for name, loss in LOSSES.items():
            for options in OPTIONS:
                batch = batch_of(name, sum(counts))
                rank = dist.get_rank()
                local = part(batch, cut(counts, rank), cut(columns_of(name, counts), rank))
                found.append(gradients(loss(**options), local))
    finally:
        calls.reduce = reduce
    return found, len(taken)


@pytest.mark.parametrize("counts", [(7,), (4, 3), (0, 5, 2), (1, 3, 0, 3)], ids=str)
def test_values_and_gradients_are_those_of_a_dense_matrix(counts):
    results = run_ranks(of_rank, len(counts), counts, timeout_s=120)
    cases = [(name, options) for name in LOSSES for options in OPTIONS]
    in_tiles = len([name for name, _ in cases if name == "clip relative"])  # two passes, which kernels compute
    assert {taken for _, taken in results} == {len(cases) - in_tiles}
    for (name, options), *ranks in zip(cases, *[found for found, _ in results], strict=True):
        batch = batch_of(name, sum(counts))
        expected, wanted = gradients(LOSSES[name]().reference, batch)
        for value, _ in ranks:
            assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12), (name, options, value, expected)
        for key, want in wanted.items():
            each = [grads[key] for _, grads in ranks]
            shared = key.startswith("parameters")
            if options.get("sync", "mean") == "mean":
                got = sum(each) / len(each) if shared else torch.cat(each) / len(counts)
            else:
                got = sum(each) if shared else torch.cat(each)
            assert torch.allclose(got, want, rtol=1e-10, atol=1e-10), (name, options, key)


@pytest.mark.planted
def test_a_pass_with_wrong_pairs_would_show(monkeypatch):
    """Teeth: with the row itself among the candidates, or a count that is one too high, values differ."""
    batch = batch_of("sup_con", 7)
    expected = call(sup_con().reference, batch)
    for name, wrong in (("excluded", None), ("positive", SAME)):
        change = partial(_with, name, wrong)
        monkeypatch.setattr("wholebatch.pair_loss.module.lowered", change)
        assert not torch.allclose(call(sup_con(), batch), expected, rtol=1e-3)
    monkeypatch.undo()
    assert torch.allclose(call(sup_con(), batch), expected, rtol=1e-12)


def _with(name, value, declared, arguments):
    found = lowered(declared, arguments)
    (one,) = found.passes
    changed = type(one)(**{**vars(one), name: value})
    return type(found)([changed], found.counted)


@pytest.mark.planted
@pytest.mark.parametrize("wrong", [2.0, -1.0])
def test_wrong_slopes_would_show(monkeypatch, wrong):
    slopes = calls.Call.slopes
    monkeypatch.setattr(calls.Call, "slopes", lambda *arguments: wrong * slopes(*arguments))
    batch = batch_of("siglip", 7)
    (value, grads), (expected, wanted) = gradients(siglip(), batch), gradients(siglip().reference, batch)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert not torch.allclose(grads["y "], wanted["y "], rtol=0.1)


def sigmoid(argument, **options):
    return {"a": wb.terms.Sum(lambda *entry: softplus(argument(*entry), **options))}


def lowered_partners(loss, batch):
    given = {name: getattr(batch, name) for name in ("x", "y", "x_data", "y_data", "parameters")}
    return [*lowered(loss.declaration, arguments_of(loss, **given)).partners]


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        ({"a": wb.terms.LogSumExp(score), "own": wb.terms.Partner(score)}, ["own"]),
        ({"a": wb.terms.LogSumExp(score, other), "own": wb.terms.Partner(score)}, ["own"]),
        ({"a": wb.terms.LogSumExp(score), "own": wb.terms.Partner(lambda s, x, y, p: 3 * p.scale * s)}, []),
        ({"a": wb.terms.LogSumExp(score), "own": wb.terms.Partner(lambda s, x, y, p: p.scale * s + x.label)}, []),
        ({"a": wb.terms.LogSumExp(score, different), "own": wb.terms.Partner(score)}, []),
    ],
)
@pytest.mark.parametrize("pair", [False, True])
def test_partners_of_the_same_score_come_with_the_sweep(terms, names, pair):
    loss, rows = wb.PairLoss(terms, lambda r, x, p: r.a.clamp(min=-9) * 2 - r.own), batch_of("clip", 6)
    rows.x_data, rows.y_data = {"label": torch.arange(6) % 3}, {"label": torch.arange(6) % 2}
    if pair:  # partners are anywhere then
        rows.x_data["pair"], rows.y_data["pair"] = torch.arange(6), torch.tensor([3, 1, 0, 5, 4, 2])
    assert lowered_partners(loss, rows) == ([] if pair else names)
    (value, grads), (expected, wanted) = gradients(loss, rows), gradients(loss.reference, rows)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert all(torch.allclose(grads[key], wanted[key], rtol=1e-10, atol=1e-12) for key in wanted)


def of(score, where=None, beside=None):
    terms = {"a": wb.terms.LogSumExp(score, where)}
    return terms if beside is None else {**terms, "b": beside}


NOT_LOWERED = {
    "two factors": of(score, beside=wb.terms.LogSumExp(lambda s, x, y, p: 2 * p.scale * s)),
    "two sets": of(score, beside=wb.terms.LogSumExp(score, other)),
    "data": of(lambda s, x, y, p: p.scale * s + y.label),
    "a square": of(lambda s, x, y, p: p.scale * s * s),
    "a mask of similarities": of(score, lambda x, y, s: s > 0),
    "a maximum": of(score, beside=wb.terms.Max(score)),
    "no exponentials": {"a": wb.terms.Sum(score)},
    "of one class": of(score, same),
    "a mean over others": of(score, beside=wb.terms.Mean(score, other)),
    "a sum over other classes": of(score, beside=wb.terms.Sum(score, different)),
    "a factor with the partner": of(lambda s, x, y, p: s * (1 - x.partner), other),
    "a quotient by the partner": of(lambda s, x, y, p: s / (2 + x.partner.abs()), other),
    "a clamped partner": of(lambda s, x, y, p: s - (x.partner - 0.7).relu(), other),
    "partners alone": of(lambda s, x, y, p: p.scale * x.partner),
    "a detached partner": of(lambda s, x, y, p: s - x.partner + x.partner.detach(), other),
    "a clamped factor": of(
        lambda s, x, y, p: p.scale.clamp(max=1.5) * s, beside=wb.terms.Sum(lambda s, x, y, p: p.scale * s)
    ),
    "a detached factor": of(
        lambda s, x, y, p: p.scale.detach() * s, beside=wb.terms.Sum(lambda s, x, y, p: p.scale * s)
    ),
    "a softplus that torch rounds": sigmoid(score),
    "another softplus": sigmoid(score, beta=2, threshold=40),
    "a softplus of data": sigmoid(lambda s, x, y, p: s + y.label, threshold=40),
    "a softplus of partners": sigmoid(lambda s, x, y, p: s - x.partner, threshold=40),
    "a softplus of a square": sigmoid(lambda s, x, y, p: s * s, threshold=40),
    "more than a softplus": of(score) | {"a": wb.terms.Sum(lambda s, x, y, p: softplus(s, threshold=40) * s)},
    "two of softplus": sigmoid(score, threshold=40) | {"b": wb.terms.Sum(score)},
    "a softplus of one class": {"a": wb.terms.Sum(lambda s, x, y, p: softplus(s, threshold=40), same)},
}


@pytest.mark.parametrize("name", NOT_LOWERED)
def test_tiles_of_any_terms_compute_the_rest(name, monkeypatch):
    monkeypatch.setattr(calls, "reduce", None)  # which no such loss may call
    loss = wb.PairLoss(NOT_LOWERED[name], lambda r, x, p: sum(r[key] for key in r), similarity="cosine")
    batch = batch_of("sup_con", 6)
    value, grads = gradients(loss, batch)
    expected, wanted = gradients(loss.reference, batch)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert all(torch.allclose(grads[key], wanted[key], rtol=1e-10, atol=1e-12) for key in wanted)


@pytest.mark.parametrize(
    "scored",
    [
        lambda s, x, y, p: s - x.partner + 0.6,
        lambda s, x, y, p: s + (p.scale - 3).relu(),
        lambda s, x, y, p: s + (p.number - 1),
        lambda s, x, y, p: p.number * s + (p.scale - p.scale.detach()),
        lambda s, x, y, p: s / p.scale - 2 * x.partner / p.scale,
    ],
)
def test_constants_of_scores_count_at_all_values_of_parameters(scored):
    loss, batch = wb.PairLoss({"a": wb.terms.LogSumExp(scored, other)}, lambda r, x, p: r.a), batch_of("sup_con", 6)
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    batch.parameters = {"scale": scale, "number": torch.tensor(3)}
    assert lowered(loss.declaration, arguments_of(loss, batch.x, parameters=batch.parameters)) is not None
    value, grads = gradients(loss, batch)
    expected, wanted = gradients(loss.reference, batch)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert all(torch.allclose(grads[key], wanted[key], rtol=1e-10, atol=1e-12) for key in wanted)


def test_an_object_that_changes_is_called_again():
    """No fingerprint sees the list of a callable object, or an array."""

    class Mask:
        names = ("label",)

        def __init__(self):
            self.names = ["label"]

        def __call__(self, x, y):
            return x[self.names[0]] != y[self.names[0]]

    mask, array, batch = Mask(), np.zeros(1), batch_of("sup_con", 6)
    batch.x_data["domain"] = torch.arange(6) % 2
    batch.parameters = {}
    loss = wb.PairLoss({"a": wb.terms.LogSumExp(lambda s, x, y, p: s + array[0], mask)}, lambda r, x, p: r.a)
    for change in (lambda: None, lambda: mask.names.insert(0, "domain"), lambda: array.fill(1.0)):
        change()
        assert torch.allclose(call(loss, batch), call(loss.reference, batch), rtol=1e-12)


def test_a_factor_of_zero_takes_tiles_of_any_terms(monkeypatch):
    monkeypatch.setattr(calls, "reduce", None)
    batch = batch_of("sup_con", 6)
    batch.parameters = {"scale": 0.0}
    assert torch.allclose(call(sup_con(), batch), call(sup_con().reference, batch))


def test_a_function_that_changes_is_looked_at_again():
    """A score whose captured number makes it another function, and a mask likewise, between two calls."""
    captured = {"power": 1, "label": False}

    def powered(s, x, y, p):
        return s if captured["power"] == 1 else s * s

    def where(x, y):
        return (x.label != y.label) if captured["label"] else (x.index != y.index)

    loss, batch = wb.PairLoss({"a": wb.terms.LogSumExp(powered, where)}, lambda r, x, p: r.a), batch_of("sup_con", 6)
    batch.parameters = {}
    values = []
    for change in ({}, {"power": 2}, {"label": True}, {"power": 1}):
        captured.update(change)
        values.append(call(loss, batch))
        assert torch.allclose(values[-1], call(loss.reference, batch), rtol=1e-12)
    assert len({round(value.item(), 6) for value in values}) == 4


def test_parameters_that_happen_to_be_equal_stay_apart():
    """Two learned factors with the same value are two passes: else one of them would get both gradients."""
    loss = wb.PairLoss(
        {
            "a": wb.terms.LogSumExp(lambda s, x, y, p: p.first * s, other),
            "b": wb.terms.Mean(lambda s, x, y, p: p.second * s, other),
        },
        lambda r, x, p: r.a - r.b,
    )
    first, second = (torch.tensor(2.0, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.randn(6, 3, dtype=torch.float64)
    assert lowered(loss.declaration, arguments_of(loss, x, parameters={"first": first, "second": second})) is None
    got = torch.autograd.grad(loss(x, parameters={"first": first, "second": second}), [first, second])
    want = torch.autograd.grad(loss.reference(x, parameters={"first": first, "second": second}), [first, second])
    assert torch.allclose(torch.stack(got), torch.stack(want), rtol=1e-10)


def test_rows_without_candidates_are_minus_infinity_with_gradient_zero():
    loss = wb.PairLoss({"a": wb.terms.LogSumExp(score, different)}, lambda r, x, p: r.a.exp(), similarity="cosine")
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    label = {"label": torch.zeros(5, dtype=torch.int64)}
    value = loss(x, x_data=label, parameters={"scale": 2.0})
    (grad,) = torch.autograd.grad(value, x)
    assert value.item() == 0
    assert not grad.any()


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("towers", [1, 2])
def test_features_in_half_precision(similarity, towers):
    """Cosines are those of rows as they are, normalized in float32: nothing is rounded to bfloat16 on the way."""
    loss = wb.PairLoss({"a": wb.terms.LogSumExp(score, other)}, lambda r, x, p: r.a, similarity=similarity)
    rows = [torch.randn(9, 16).bfloat16().requires_grad_() for _ in range(towers)]
    value, grads = gradients(loss, Batch(*rows, parameters={"scale": 3.0}))
    wide = Batch(*[x.detach().double().requires_grad_() for x in rows], parameters={"scale": 3.0})
    expected, wanted = gradients(loss.reference, wide)
    assert torch.allclose(value.double(), expected, rtol=2e-6)
    for key, want in wanted.items():
        assert (grads[key].double() - want).norm() < 4e-3 * want.norm()  # its own rounding


@pytest.mark.parametrize("scale", [100.0, -100.0])
def test_large_factors_keep_their_digits(scale):
    """One shift for all would underflow: the sweep takes each row's maximum."""
    x = torch.nn.functional.normalize(torch.randn(64, 8), dim=1).requires_grad_()
    label = {"label": torch.arange(64) % 8}
    value, grads = gradients(sup_con(), Batch(x, x_data=label, parameters={"scale": scale}))
    wide = x.detach().double().requires_grad_()
    expected, wanted = gradients(sup_con().reference, Batch(wide, x_data=label, parameters={"scale": scale}))
    assert torch.allclose(value.double(), expected, rtol=1e-5)
    assert torch.allclose(grads["x "].double(), wanted["x "], rtol=1e-3, atol=1e-4 * float(wanted["x "].abs().max()))


def another_row_loss():
    """Return the errors of three calls of a loss that adds its term up, but not for the five rows of rank 1."""
    batch, rank = batch_of("siglip", 9), dist.get_rank()
    terms, errors = sigmoid(score, threshold=40), []
    loss = wb.PairLoss(terms, lambda r, x, p: r.a if r.a.shape[0] < 5 else r.a * r.a)
    for counts in ((4, 5), (4, 4), (0, 5)):
        at = cut(counts, rank)
        try:
            call(loss, part(batch, at, at)).backward()
            errors.append("")
        except Exception as error:
            errors.append(str(error))
    return errors


def test_a_row_loss_that_adds_up_in_some_calls_alone_is_an_error_on_all_ranks():
    for errors in run_ranks(another_row_loss, 2, timeout_s=60):
        assert [bool(error) for error in errors] == [True, False, True]
        assert "row_loss must add its terms up" in errors[0]


def test_a_sum_of_softplus_multiplies_rows_and_columns_once(monkeypatch):
    """Tiles of any terms do so in each pass, and so does a row loss that is no sum; dS Y and dS^T X are not counted."""
    batch, products = batch_of("siglip", 40), []
    squared = wb.PairLoss(sigmoid(score, threshold=40), lambda r, x, p: r.a * r.a)
    for loss, lowers in ((siglip(), True), (squared, True), (siglip(memory="flat"), False)):
        monkeypatch.setattr("wholebatch.pair_loss.module.lowered", lowered if lowers else lambda *_: None)
        with FlopCounterMode(display=False) as flops:
            gradients(loss, batch)
        products.append(flops.get_total_flops() // (2 * 40 * 40 * 5))
    assert products == [1, 2, 2]


def is_exact(loss, batch, taken=True):
    """Assert that a loss is its own reference, and whether a sweep of the built-in losses computes it."""
    (value, grads), (expected, wanted) = gradients(loss, batch), gradients(loss.reference, batch)
    assert torch.allclose(value, expected, rtol=1e-12)
    assert all(torch.allclose(grads[key], wanted[key], rtol=1e-10, atol=1e-12) for key in wanted)
    assert loss.computed_by.endswith("sweep") == taken


def test_a_row_without_candidates_and_without_weight_has_no_slope():
    terms = {"a": wb.terms.Sum(lambda s, x, y, p: softplus(s, threshold=40), different), "n": wb.terms.Count(different)}
    batch = batch_of("sup_con", 6)
    x, y = batch.x.detach().requires_grad_(), batch.x.detach().flip(0).requires_grad_()
    rows, cols = ({"label": torch.tensor(labels)} for labels in ([0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]))
    loss = wb.PairLoss(terms, lambda r, x, p: (r.a / r.n, (r.n > 0).double()))
    value = loss(x, y, x_data=rows, y_data=cols)
    assert torch.allclose(value, loss.reference(x, y, x_data=rows, y_data=cols), rtol=1e-12)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(value, (x, y)))


@pytest.mark.parametrize("over", ["own", "both"])
@pytest.mark.parametrize("summed", ["batch", "both"])
def test_counts_of_own_candidates_are_known_after_the_sweep(over, summed):
    terms = {
        "a": wb.terms.Sum(lambda s, x, y, p: softplus(s, threshold=40), over=summed),
        "n": wb.terms.Count(over=over),
    }
    is_exact(wb.PairLoss(terms, lambda r, x, p: r.a / (1 + r.n)), batch_of("own", 6))


@pytest.mark.parametrize("threshold", [0.0, 5.0])
def test_in_float32_a_softplus_with_a_small_threshold_is_another_function(threshold):
    loss = wb.PairLoss(sigmoid(score, threshold=threshold), lambda r, x, p: r.a)
    x = torch.randn(6, 3)
    assert torch.allclose(loss(x, parameters={"scale": 2.0}), loss.reference(x, parameters={"scale": 2.0}), rtol=1e-5)
    assert loss.computed_by == "tiles"


class Reversed(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def without_gradient(s, x, y, p):
    with torch.no_grad():
        part = 0.5 * s
    return 2 * s - part


@pytest.mark.parametrize("scored", [without_gradient, lambda s, x, y, p: 2 * Reversed.apply(s)])
@pytest.mark.parametrize("kind", ["softplus", "LogSumExp"])
def test_gradients_that_differ_from_the_operations_are_seen(scored, kind):
    terms = sigmoid(scored, threshold=40) if kind == "softplus" else {"a": wb.terms.LogSumExp(scored)}
    is_exact(wb.PairLoss(terms, lambda r, x, p: r.a), batch_of("clip", 6), taken=False)


@pytest.mark.parametrize(
    "row_loss", [lambda r, x, p: r.own + Reversed.apply(r.a), lambda r, x, p: r.own + r.a.detach()]
)
def test_row_losses_with_gradients_of_their_own(row_loss):
    terms = sigmoid(score, threshold=40) | {"own": wb.terms.Partner(score)}
    is_exact(wb.PairLoss(terms, row_loss), batch_of("clip", 6))


class Power(int):
    """A subclass, whose text is that of a number."""

    read: ClassVar = {"power": 1}

    def of(self, s):
        return power_of(s, self.read["power"])


def power_of(s, power):
    return 2 * s if power == 1 else 2 * s * s


def powered_by(s, x, y, p):
    return power_of(s, powered_by.power)


table, number = {"power": 1}, Power(3)
look_up = table.get
CHANGES = {
    "an attribute of the function": (powered_by, lambda power: setattr(powered_by, "power", power)),
    "a method of a dict": (lambda s, x, y, p: power_of(s, look_up("power")), lambda power: table.update(power=power)),
    "a subclass of int": (lambda s, x, y, p: number.of(s), lambda power: Power.read.update(power=power)),
    "a wrapped function of torch": (
        functools.wraps(torch.nn.functional.relu)(lambda s, x, y, p: power_of(s, table["power"])),
        lambda power: table.update(power=power),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_functions_that_may_change_unseen_are_looked_at_in_each_call(name):
    scored, change = CHANGES[name]
    batch, loss = batch_of("clip", 6), wb.PairLoss({"a": wb.terms.LogSumExp(scored)}, lambda r, x, p: r.a)
    for power in (1, 2, 1):
        change(power)
        is_exact(loss, batch, taken=power == 1)


def test_functions_of_one_text_that_compute_differently_stay_apart():
    two, three = (functools.partial(lambda a, s, x, y, p: a[0] * s, np.array([number])) for number in (2.0, 3.0))
    terms = {"a": wb.terms.LogSumExp(two), "own": wb.terms.Partner(three)}
    is_exact(wb.PairLoss(terms, lambda r, x, p: r.a - r.own), batch_of("clip", 6))


def test_a_score_that_begins_to_read_partners():
    captured = {"partner": False}

    def relative(s, x, y, p):
        return 2 * (s - x.partner) if captured["partner"] else 2 * s

    loss, batch = wb.PairLoss({"a": wb.terms.LogSumExp(relative)}, lambda r, x, p: r.a), batch_of("clip", 6)
    for partner in (False, True, False):
        captured["partner"] = partner
        is_exact(loss, batch)


def partner_read_on_one_rank():
    """Return the value of a loss whose column loss reads a Partner where this rank's data say so."""
    terms = {"a": wb.terms.LogSumExp(score), "own": wb.terms.Partner(score)}
    loss = wb.PairLoss(
        terms,
        lambda r, x, p: r.a - r.own,
        column_loss=lambda r, y, p: r.a - (r.own if bool((y.label > 0).any()) else 0),
    )
    batch, rank = batch_of("clip", 6), dist.get_rank()
    label = {"label": torch.full((3,), rank)}
    local = Batch(
        batch.x.detach()[3 * rank :][:3], batch.y.detach()[3 * rank :][:3], label, label, parameters=batch.parameters
    )
    return call(loss, local).item()


def test_a_partner_that_one_rank_reads_is_no_reason_to_wait():
    one, other_rank = run_ranks(partner_read_on_one_rank, 2, timeout_s=60)
    assert one == other_rank


def values_of_another_call():
    """Return whether calls of one kind agree after another kind was looked at, and not compared, on this rank."""
    loss, batch = siglip(), batch_of("siglip", 4)
    call(loss, batch)
    loss.reference(batch.x, batch.y, parameters={"scale": 2.0 + dist.get_rank()})
    return call(loss, Batch(batch.x.detach(), batch.y.detach(), parameters=batch.parameters)).item()


def test_values_of_one_kind_of_call_are_not_compared_with_those_of_another():
    one, other_rank = run_ranks(values_of_another_call, 2, timeout_s=60)
    assert one == other_rank


def raise_on_one_rank():
    """Return the errors of three calls of a loss whose score fails on rank 1 in the second one."""
    batch, errors = batch_of("clip", 4), []

    def fragile(s, x, y, p):
        if os.environ.get("BROKEN"):
            raise RuntimeError("broken")
        return p.scale * s

    loss = wb.PairLoss({"all": wb.terms.LogSumExp(fragile, other)}, lambda r, x, p: r.all)
    for number in range(3):
        os.environ["BROKEN"] = "yes" if number == 1 and dist.get_rank() == 1 else ""
        try:
            call(loss, batch).backward()
            errors.append("")
        except Exception as error:
            errors.append(str(error))
    return errors


def test_a_score_that_raises_on_one_rank_raises_on_all():
    for errors in run_ranks(raise_on_one_rank, 2, timeout_s=60):
        assert [bool(error) for error in errors] == [False, True, False]
        assert "broken" in errors[1]
