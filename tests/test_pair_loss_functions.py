"""Functions of users that look at their data, take other forms, or nearly fool the sweep: right, or refused."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pair_losses import Batch, gradients
from torch import nn

import wholebatch as wb
from wholebatch.pair_loss.tile import Leaves
from wholebatch.testing import run_ranks


def other(x, y):
    return x.index != y.index


def row(r, x, p):
    return r.t


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(**data):
    return Batch(numbers(9, 4).requires_grad_(), numbers(9, 4, seed=1).requires_grad_(), **data)


def agrees(loss_fn, of):
    """Compare value and gradients with the dense matrix."""
    (value, grads), (expected, wanted) = gradients(loss_fn, of), gradients(loss_fn.reference, of)
    assert torch.allclose(value, expected, rtol=1e-11, atol=1e-11)
    for name, grad in grads.items():
        assert torch.allclose(grad, wanted[name], rtol=1e-9, atol=1e-9), name
    return value


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, s, x, y, p):
        return self.relu(s - 0.1)


def through_data(s, x, y, p):
    t = s * 2
    t.data = t.data.relu()
    return t


# Scores that look affine to one who only sees the outermost operation, or a few entries.
NOT_AFFINE = {
    "relu in place": lambda s, x, y, p: F.relu(s - 0.1, inplace=True),
    "leaky relu in place": lambda s, x, y, p: F.leaky_relu(s - 0.1, inplace=True),
    "a module that clamps in place": Clamped(),
    "through .data": through_data,
    "control flow": lambda s, x, y, p: s if bool((s > -9).all()) and s.shape[0] < 0 else s.relu(),
    "a look at the data": lambda s, x, y, p: s if not bool(x.kind.any()) else torch.where(x.kind == 0, s, s**2),
    "a constant slope": lambda s, x, y, p: s * s.detach(),
    "a piece": lambda s, x, y, p: s.clamp(min=-0.5),
    "numpy": lambda s, x, y, p: s * torch.as_tensor(s.detach().exp().numpy()),
}
AFFINE = {
    "scaled": lambda s, x, y, p: p.scale * s,
    "by row": lambda s, x, y, p: (s - x.bias) / (1 + y.bias**2),
    "partner": lambda s, x, y, p: p.scale * (s - x.partner),
    "both biases": lambda s, x, y, p: s + x.bias + y.bias,
    "slope 0 in one row": lambda s, x, y, p: s * torch.where(x.index == 2, 0, x.bias),
    "a far bias": lambda s, x, y, p: 1e-6 * p.scale * s + 10.0,
    "float64 beside": lambda s, x, y, p: s * 2 + x.bias * 1e7,
}


@pytest.mark.parametrize("term", [wb.terms.Sum, wb.terms.LogSumExp, wb.terms.Mean, wb.terms.Max])
@pytest.mark.parametrize("name", [*NOT_AFFINE, *AFFINE])
def test_scores_that_are_affine_and_others(name, term):
    kind = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1])
    of = batch(
        x_data={"kind": kind, "bias": numbers(9, seed=2).requires_grad_()},
        y_data={"bias": numbers(9, seed=3).requires_grad_()},
        parameters={"scale": torch.tensor(1.3, dtype=torch.float64, requires_grad=True)},
    )
    agrees(wb.PairLoss({"t": term({**NOT_AFFINE, **AFFINE}[name])}, row), of)


@pytest.mark.parametrize("term", [wb.terms.LogSumExp, wb.terms.Max])
def test_an_infinite_bias_leaves_a_column_out(term):
    bias = numbers(9, seed=2)
    bias[2] = -math.inf
    loss = agrees(wb.PairLoss({"t": term(lambda s, x, y, p: s + y.bias)}, row), batch(y_data={"bias": bias}))
    assert loss.isfinite()


def test_a_masked_integer_enters_no_gradient():
    counts = torch.tensor([0, 1, 2, 3, 0, 5, 6, 7, 8])
    loss_fn = wb.PairLoss({"t": wb.terms.Sum(lambda s, x, y, p: s - p.a * y.n.log(), where=lambda x, y: y.n > 0)}, row)
    a = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert agrees(loss_fn, batch(y_data={"n": counts}, parameters={"a": a})).isfinite()
    assert a.grad.isfinite()


def test_calls_with_other_data_and_other_numbers():
    """A function may look at what there is, and at plain numbers: what it reads belongs to the call."""
    loss_fn = wb.PairLoss({"t": wb.terms.Sum(lambda s, x, y, p: s * x.t if "t" in x else s)}, row)
    of, plain = batch(x_data={"t": numbers(9, seed=5)}), batch()
    for one in (of, plain, of):
        agrees(loss_fn, one)
    warm = wb.PairLoss(
        {"t": wb.terms.Sum(lambda s, x, y, p: s if p.epoch < 5 else s - x.partner), "u": wb.terms.Count()},
        lambda r, x, p: r.t if p.epoch < 9 else r.t + r.u,
    )
    with pytest.warns(UserWarning, match="neither side reads: u"):
        agrees(warm, batch(parameters={"epoch": 1}))
    for epoch in (7, 10, 1):
        agrees(warm, batch(parameters={"epoch": epoch}))


def test_a_partner_that_only_the_row_loss_reads():
    agrees(wb.PairLoss({"t": wb.terms.LogSumExp()}, lambda r, x, p: r.t - x.partner), batch())


class Mask(nn.Module):
    def forward(self, x, y):
        return x.index != y.index


@pytest.mark.parametrize(
    "where",
    [lambda x, y, k=1: (x.n >= k) & (y.n >= k), Mask(), lambda *a: a[0].n == a[1].n, lambda x, y: torch.tensor(True)],
    ids=["default", "module", "star", "scalar"],
)
def test_forms_of_masks(where):
    n = torch.arange(9) % 3
    agrees(
        wb.PairLoss({"t": wb.terms.Sum(where=where), "c": wb.terms.Count(where)}, lambda r, x, p: r.t + r.c),
        batch(x_data={"n": n}, y_data={"n": n}),
    )


def test_symmetric_scores_with_partners():
    loss_fn = wb.PairLoss(
        {"t": wb.terms.Sum(lambda s, x, y, p: (s - x.partner - y.partner).tanh())}, row, symmetric=True
    )
    agrees(loss_fn, Batch(numbers(9, 4).requires_grad_()))


def test_one_parameter_under_two_names():
    q = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    loss_fn = wb.PairLoss({"t": wb.terms.Sum(lambda s, x, y, p: p.a * s + p.b)}, row, parameters={"a": q, "b": q})
    loss_fn(numbers(4, 3), numbers(4, 3, seed=1)).backward()
    assert q.grad.isfinite()


REFUSED = {
    "a write behind a mask": (lambda s, x, y, p: s.clamp_(min=0), "must not write into its arguments"),
    "a write into data behind a mask": (lambda s, x, y, p: s * x.t.mul_(2), "must not write into its arguments"),
    "softmax behind a mask": (lambda s, x, y, p: s.softmax(1), "its values change when the tile is cut"),
    "the first column's number": (lambda s, x, y, p: s + y.t[0], "its values change when the tile is cut"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_other_shapes_and_masks_show(name):
    score, message = REFUSED[name]
    same = torch.zeros(9, dtype=torch.long)
    loss_fn = wb.PairLoss({"t": wb.terms.Sum(score, where=lambda x, y: x.label != y.label)}, row)
    t = numbers(9, seed=4)
    with pytest.raises(ValueError, match=message):
        loss_fn(numbers(9, 4), numbers(9, 4), x_data={"label": same, "t": t}, y_data={"label": same, "t": t})


def test_a_row_loss_that_mixes_rows_of_several_similarities():
    loss_fn = wb.PairLoss(
        {"t": wb.terms.Sum(lambda s, x, y, p: s.a)},
        lambda r, x, p: r.t * r.t.softmax(0),
        similarity={"a": "dot", "b": "dot"},
    )
    x = {"a": numbers(9, 4), "b": numbers(9, 2)}
    with pytest.raises(ValueError, match="row_loss must compute the loss of each row"):
        loss_fn(x, x)


def test_names_that_every_module_has():
    with pytest.raises(ValueError, match="parameters must not have the name 'half'"):
        wb.PairLoss({"t": wb.terms.Sum()}, row, parameters={"half": torch.tensor(0.5)})


label = None  # a global with the name of an attribute, see below


class OfRank:
    def __init__(self, rank):
        self.rank, self.margin = rank, 0.5

    def score(self, s, x, y, p):
        return (s - self.margin).tanh()


def of_ranks(what):
    """Return the loss of both ranks' rows: ranks look at different data, and have different globals."""
    rank = dist.get_rank()
    x, rows = numbers(12, 4)[6 * rank : 6 * rank + 6], torch.arange(6 * rank, 6 * rank + 6)
    globals()["label"] = torch.zeros(3 + rank)
    shortcut = {
        "a shortcut": lambda s, x, y, p: torch.where(x.kind > 0, s + y.b, s) if bool(x.kind.any()) else s,
        "a late look": lambda s, x, y, p: torch.where(x.kind > 0, s * x.b, s) if bool(x.kind.any()) else s,
        "a global": lambda s, x, y, p: s * x.label,
        "an object": OfRank(rank).score,
    }[what]
    kind = (rows > 5).long() if what == "a shortcut" else (rows == 11).long()
    data = {"kind": kind, "label": rows, "b": rows.double()}
    return wb.PairLoss({"t": wb.terms.Sum(shortcut)}, row)(x, x, x_data=data, y_data=data)


@pytest.mark.parametrize("what", ["a shortcut", "a late look", "a global", "an object"])
def test_ranks_may_look_at_different_data(what):
    rows, x = torch.arange(12), numbers(12, 4)
    kind = (rows > 5).long() if what == "a shortcut" else (rows == 11).long()
    s, b = x @ x.T, rows.double()
    expected = {
        "a shortcut": torch.where(kind[:, None] > 0, s + b, s),
        "a late look": torch.where(kind[:, None] > 0, s * b[:, None], s),
        "a global": s * rows[:, None],
        "an object": (s - 0.5).tanh(),
    }[what]
    for found in run_ranks(of_ranks, 2, what, timeout_s=30):
        assert torch.allclose(found, expected.sum(1).mean())


# Slopes, bounds, and ties.


def sigmoid_losses(**options):
    """The same loss by autograd and by its slope."""

    def score(s, x, y, p):
        return torch.nn.functional.softplus(3 * s - 1, threshold=40)

    def slope(s, x, y, p):
        return 3 * torch.sigmoid(3 * s - 1)

    for given in ({}, {"slope": slope}):
        terms = {
            kind.__name__: kind(score, where=other, **given)
            for kind in (wb.terms.Sum, wb.terms.LogSumExp, wb.terms.Mean)
        }
        yield wb.PairLoss(
            terms, lambda r, x, p: r.Sum + r.LogSumExp * r.Mean, column_loss=lambda r, y, p: r.Sum, **options
        )


@pytest.mark.parametrize("options", [{}, {"memory": 3000}, {"exchange": "ring"}], ids=str)
def test_a_slope_replaces_autograd(options):
    found = []
    for loss_fn in sigmoid_losses(**{"memory": "flat", **options}):
        x, y = (torch.randn(11, 4, generator=torch.Generator().manual_seed(at)).double() for at in (0, 1))
        x.requires_grad_(), y.requires_grad_()
        with patch.object(Leaves, "gradients", autospec=True, side_effect=Leaves.gradients) as by_autograd:
            loss_fn(x, y).backward()
        found.append((x.grad, y.grad, by_autograd.call_count))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-12)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-12)
    assert found[0][2] > 0
    assert found[1][2] == 0


@pytest.mark.planted
def test_a_wrong_slope_is_refused():
    loss_fn = wb.PairLoss({"t": wb.terms.Sum(lambda s, x, y, p: s**2, slope=lambda s, x, y, p: s)}, lambda r, x, p: r.t)
    with pytest.raises(ValueError, match="slope must be the derivative of the score by s"):
        loss_fn(torch.eye(3))
    with pytest.raises(ValueError, match="slope must be left out without a score"):
        wb.terms.Sum(slope=lambda s, x, y, p: s)
    with pytest.raises(ValueError, match="slope must be left out beside log_weight"):
        wb.terms.Mean(lambda s, x, y, p: s, log_weight=lambda s, x, y, p: s, slope=lambda s, x, y, p: 1)


def test_a_slope_is_not_used_where_data_have_a_gradient():
    def score(s, x, y, p):
        return (s * y.bias).exp()

    terms = {"t": wb.terms.Sum(score, slope=lambda s, x, y, p: y.bias * (s * y.bias).exp())}
    loss_fn = wb.PairLoss(terms, lambda r, x, p: r.t)
    x, bias = torch.randn(2, 5, 5, dtype=torch.float64).unbind()
    bias = bias[0].clone().requires_grad_()
    loss_fn(x, x, y_data={"bias": bias}).backward()
    assert torch.allclose(bias.grad, torch.autograd.grad(((x @ x.T) * bias).exp().sum(1).mean(), bias)[0])


@pytest.mark.parametrize("bound", [0.0, 3.0, -2.0])
def test_a_bound_changes_nothing(bound):
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for given in ({}, {"bound": bound}):
        terms = {"t": wb.terms.LogSumExp(lambda s, x, y, p: s.tanh(), where=other, **given)}
        loss = wb.PairLoss(terms, lambda r, x, p: r.t, column_loss=lambda r, y, p: r.t, memory=3000)(x)
        results.append((loss, *torch.autograd.grad(loss, x)))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
    with pytest.raises(ValueError, match="bound must be a number"):
        wb.terms.LogSumExp(bound="1")


def tied(term, where, **options):
    def loss(r, x, p):
        return torch.where(r.t.isinf(), 0.0, r.t) * x.factor

    terms = {"t": term(lambda s, x, y, p: s, where=where, ties="split")}
    return wb.PairLoss(terms, loss, column_loss=loss, **options)


def tied_batch():
    """Small integers: many products are equal, and none is rounded."""
    made = torch.Generator().manual_seed(0)
    x = torch.randint(-1, 2, (9, 3), generator=made).double()
    return x, torch.randint(0, 3, (9,), generator=made), torch.rand(9, generator=made, dtype=torch.float64)


def tied_on(counts, term, options):
    x, labels, factor = tied_batch()
    at = slice(sum(counts[: dist.get_rank()]), sum(counts[: dist.get_rank() + 1]))
    x = x[at].clone().requires_grad_()
    loss = tied(term, other_label, **options)(x, x_data={"label": labels[at], "factor": factor[at]})
    loss.backward()
    return loss.detach(), x.grad


def other_label(x, y):
    return x.label != y.label


@pytest.mark.parametrize("counts", [(9,), (4, 0, 5)], ids=str)
@pytest.mark.parametrize("term", [wb.terms.Max, wb.terms.Min])
def test_ties_are_split_as_in_amax(counts, term):
    x, labels, factor = tied_batch()
    x.requires_grad_()
    none = float("-inf") if term is wb.terms.Max else float("inf")
    s = (x @ x.T).masked_fill(labels[:, None] == labels, none)
    assert ((s == s.amax(1, keepdim=True)).sum(1) > 1).any()
    best = [s.amax(dim) if term is wb.terms.Max else s.amin(dim) for dim in (1, 0)]
    loss = sum((torch.where(of.isinf(), 0.0, of) * factor).mean() for of in best)
    loss.backward()
    for options in ({}, {"exchange": "ring"}, {"memory": 1000}):
        found = run_ranks(tied_on, len(counts), counts, term, options)
        assert all(torch.isclose(value, loss.detach(), rtol=1e-12) for value, _ in found)
        grad = torch.cat([grad for _, grad in found]) / len(counts)
        assert torch.allclose(grad, x.grad, rtol=1e-12, atol=1e-14)
    x.grad = None
    tied(term, other_label).reference(x, x_data={"label": labels, "factor": factor}).backward()
    assert torch.allclose(x.grad, grad, rtol=1e-12, atol=1e-14)
    x.grad = None
    terms = {"t": term(where=other_label)}
    first = wb.PairLoss(terms, lambda r, x, p: torch.where(r.t.isinf(), 0.0, r.t) * x.factor)
    first(x, x_data={"label": labels, "factor": factor}).backward()
    assert not torch.allclose(x.grad, grad)  # the lowest index has all of it


def test_ties_of_own_candidates():
    x, own = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 3, 2, dtype=torch.float64, requires_grad=True)
    for term in (wb.terms.Max, wb.terms.Min):
        own.grad = None
        wb.PairLoss({"t": term(over="own", ties="split")}, lambda r, x, p: r.t)(x, candidates=own).backward()
        assert torch.allclose(own.grad, torch.full_like(own, 1 / 3))
    with pytest.raises(ValueError, match="ties must be 'first' with over='both'"):
        wb.terms.Max(over="both", ties="split")
    with pytest.raises(ValueError, match=r"ties='first' with compile_tiles=True"):
        wb.PairLoss({"t": wb.terms.Max(ties="split")}, lambda r, x, p: r.t, compile_tiles=True)
