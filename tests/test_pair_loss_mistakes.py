"""Mistakes in a declaration or a call of wb.PairLoss raise at entry, on all ranks, and say how to go on."""

import ctypes
import dataclasses
import functools
import os
import struct
import warnings
from collections import deque
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import wholebatch as wb
from wholebatch.testing import RankError, run_ranks

X = torch.randn(5, 3)
LABELS = torch.tensor([0, 1, 0, 1, 2])
MODULE_BIAS = torch.randn(5)


def read(r, x, p):
    return r.t


def declared(score=None, where=None, row_loss=read, term=wb.terms.Sum, **options):
    return wb.PairLoss({"t": term(score, where)}, row_loss, **options)


class Owner:
    def __init__(self):
        self.margin = torch.ones(3, requires_grad=True)

    def score(self, s, x, y, p):
        return s - self.margin[0]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, s, x, y, p):
        return s * self.scale


def with_keyword(s, x, y, p, *, bias):
    return s + bias


def draws(s, x, y, p):
    return s + torch.rand_like(s)


def drops(s, x, y, p):
    return torch.nn.functional.dropout(s, 0.5)


CLOSURE = torch.randn(5, 5)
LOCAL = [torch.zeros(4)]


def exponentials_of_numpy(s, x, y, p):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of how torch wraps arrays
        return np.exp(s)


DECLARATIONS = {
    "closure": (lambda: declared(lambda s, x, y, p, of=CLOSURE: s + of[:1, :1]), "got 'default 0' of shape (5, 5)"),
    "global": (
        lambda: declared(lambda s, x, y, p: s + MODULE_BIAS[0]),
        "got 'MODULE_BIAS' of shape (5,) from elsewhere",
    ),
    "self": (lambda: declared(Owner().score), "got 'self.margin' of shape (3,) with a gradient"),
    "module": (lambda: declared(Layer()), "got 'scale' of a Layer of shape (1,) with a gradient"),
    "partial": (
        lambda: declared(functools.partial(with_keyword, bias=torch.ones(1))),
        "got 'bias' of a functools.partial",
    ),
    "in a mask": (
        lambda: declared(None, lambda x, y: x.index > LOCAL[0].sum()),
        "must receive its tensors as x, y or p",
    ),
    "in a row loss": (
        lambda: declared(row_loss=lambda r, x, p: r.t * MODULE_BIAS[0]),
        "row_loss must receive its tensors",
    ),
    "random": (lambda: declared(draws), "must not draw random numbers"),
    "dropout": (lambda: declared(drops), "must not draw random numbers"),
    "writing": (lambda: declared(lambda s, x, y, p: s.mul_(2)), "must not write into its arguments"),
    "writing data": (lambda: declared(lambda s, x, y, p: s * x.bias.mul_(2)), "must not write into its arguments"),
    "softmax": (lambda: declared(lambda s, x, y, p: s.softmax(1)), "its values change when the tile is cut"),
    "mean of a tile": (lambda: declared(lambda s, x, y, p: s - s.mean()), "its values change when the tile is cut"),
    "sum": (lambda: declared(lambda s, x, y, p: s.sum(1)), "must return one value for each entry, (4, 6) in a tile"),
    "transposed": (lambda: declared(lambda s, x, y, p: s.T), "must return one value for each entry"),
    "one dimension more": (lambda: declared(lambda s, x, y, p: s[None]), "must return one value for each entry"),
    "integers": (
        lambda: declared(lambda s, x, y, p: (s > 0).long()),
        "must return floating-point numbers, got torch.int64",
    ),
    "a number": (lambda: declared(lambda s, x, y, p: 1.0), "must return a tensor, got 1.0"),
    "mask": (
        lambda: declared(None, lambda x, y: (x.label == y.label).float()),
        "must return booleans, got torch.float32",
    ),
    "no such data": (
        lambda: declared(lambda s, x, y, p: s * x.lable),
        "has label, bias, partner, index; did you mean label?",
    ),
    "no such parameter": (lambda: declared(lambda s, x, y, p: s * p.gamma), "p.gamma does not exist"),
    "numpy": (
        lambda: declared(exponentials_of_numpy),
        "such as torch.exp(s) for numpy.exp(s)",
    ),
    "no such term": (lambda: declared(row_loss=lambda r, x, p: r.positives), "r.positives does not exist: r has t"),
    "arguments": (lambda: declared(lambda s, x, y: s), "failed on a tile of 4 rows and 6 columns: TypeError"),
    "mixes rows": (
        lambda: declared(row_loss=lambda r, x, p: r.t - r.t.mean()),
        "its values change when the rows are cut",
    ),
    "weights of many rows": (
        lambda: declared(row_loss=lambda r, x, p: (r.t, 1 + 0 * r.t) if len(r.t) > 2 else r.t),
        "its values change when the rows are cut",
    ),
    "mean of rows": (lambda: declared(row_loss=lambda r, x, p: r.t.mean()), "must return one number for each row"),
    "mean of differences": (
        lambda: wb.PairLoss(
            {"t": wb.terms.Sum(), "u": wb.terms.Max()}, lambda r, x, p: (r.t - r.u) * (r.t - r.u).relu().mean()
        ),
        "its values change when the rows are cut",
    ),
    "arguments in another order": (lambda: declared(lambda x, y, s, p: s), "the arguments come in this order"),
    "a mask as score": (lambda: declared(lambda x, y: x.label == y.label), "a score is called as f(s, x, y, p)"),
    "pairs of rows": (lambda: declared(row_loss=lambda r, x, p: r.t[:, None]), "must return one number for each row"),
    "own": (lambda: wb.PairLoss({"t": wb.terms.Sum(over="own")}, read), "needs candidates="),
    "asymmetric": (lambda: declared(lambda s, x, y, p: s * x.bias, symmetric=True), "differ; pass symmetric=False"),
    "two similarities": (lambda: declared(similarity={"a": "dot"}), "x must be a mapping with the names of similarity"),
}


@pytest.mark.parametrize("name", DECLARATIONS)
def test_a_function_that_no_tile_can_be_computed_with(name):
    make, message = DECLARATIONS[name]
    with pytest.raises(ValueError, match=r"^PairLoss: ") as error:
        make()(X, x_data={"label": LABELS, "bias": torch.rand(5)})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, read), "terms must be a mapping of names to terms"),
        (({"t": max}, read), r"terms\['t'\] must be a LogSumExp"),
        (({"1": wb.terms.Sum()}, read), "terms must have names like 'negatives'"),
        (({"t": wb.terms.Sum()}, None), "row_loss must be a function"),
        (({"t": wb.terms.Sum()}, 3), "row_loss must be callable"),
        (({"t": wb.terms.Mean(over="both")}, read), "must not be a Mean with over='both'"),
    ],
)
def test_wrong_declarations(arguments, message):
    with pytest.raises(ValueError, match=message):
        wb.PairLoss(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"similarity": "euclidean"}, "similarity must be one of 'dot', 'cosine', 'neg_squared_distance'"),
        ({"similarity": {}}, "at least one similarity"),
        ({"symmetric": 1}, "symmetric must be True or False"),
        ({"symmetric": True, "column_loss": read}, "symmetric must be False with a column_loss"),
        ({"reduction": "avg"}, "reduction must be one of"),
        ({"parameters": [1]}, "parameters must be a mapping"),
        ({"parameters": {"a": "1"}}, r"parameters\['a'\] must be a number, a tensor or a module"),
        ({"parameters": {"a": float("nan")}}, r"parameters\['a'\] must be finite"),
        ({"parameters": {"a": torch.ones(1, requires_grad=True).exp()}}, "got a computed tensor with a graph"),
        ({"exchange": "tree"}, "exchange must be one of"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        declared(**options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"x_data": {"label": LABELS[:3]}}, r"x_data\['label'\] must have shape \(5,\)"),
        ({"x_data": {"label": LABELS[:, None]}}, r"x_data\['label'\] must be a tensor"),
        ({"x_data": {"label": [1, 2]}}, r"x_data\['label'\] must be a tensor"),
        ({"x_data": [LABELS]}, "x_data must be a mapping"),
        ({"x_data": {"index": LABELS}}, "must not have the name 'index'"),
        ({"x_data": {"partner": LABELS}}, "must not have the name 'partner'"),
        ({"y_data": {"label": LABELS}}, "y_data must be left out where y is"),
        ({"candidates": X}, "candidates must have shape"),
        ({"candidate_data": {"a": X}}, "need candidates="),
        ({"candidates": torch.randn(5, 2, 3)}, "candidates must be left out: no term has over='own'"),
        (
            {"candidates": X, "candidate_offsets": torch.ones(5, dtype=torch.int64)},
            r"of counts pass torch.nn.functional.pad",
        ),
        ({"parameters": {"sclae": 1.0}}, "did you mean scale?"),
        ({"parameters": {"a": "1"}}, r"parameters\['a'\] must be a number, a tensor or a module"),
        ({"weights": torch.ones(3)}, "weights must have shape"),
        ({"weights": -torch.ones(5)}, "weights must not be negative"),
        ({"y": X[:, :2]}, "same embedding size"),
        ({"x": X * torch.nan}, "x must be finite"),
        ({"x": X.long()}, "x must be float64, float32, bfloat16 or float16"),
        ({"x": None}, "x must be a tensor"),
    ],
)
def test_wrong_calls(call, message):
    arguments = {"x": X, **call}
    with pytest.raises(ValueError, match=message):
        declared(parameters={"scale": 1.0})(**arguments)


@pytest.mark.parametrize(
    "pairs",
    [([0, 1, 2, 3, 4], [0, 1, 2, 3, 5]), ([0, 0, 2, 3, 4], [0, 0, 2, 3, 4]), ([0, 1, 2, 3, 4], [0, 1, 2, 3, -1])],
)
def test_pairs_that_do_not_match(pairs):
    of_x, of_y = map(torch.tensor, pairs)
    loss_fn = wb.PairLoss({"t": wb.terms.Partner()}, read)
    with pytest.raises(ValueError, match="each value of 'pair' in x_data must be there once"):
        loss_fn(X, X, x_data={"pair": of_x}, y_data={"pair": of_y})
    with pytest.raises(ValueError, match="partners need as many rows of x as of y"):
        loss_fn(X, X[:4])


def test_a_term_that_nobody_reads_is_said_once(recwarn):
    loss_fn = wb.PairLoss({"t": wb.terms.Sum(), "spare": wb.terms.Sum()}, read)
    with pytest.warns(UserWarning, match="terms that neither side reads: spare"):
        loss_fn(X)
    loss_fn(X)


def differing(what):
    rank = dist.get_rank()
    margin = 0.5 + rank if what == "captured value" else 0.5
    if what == "code" and rank:
        loss_fn = declared(lambda s, x, y, p: s + margin * 2)
    else:
        loss_fn = declared(lambda s, x, y, p: s + margin)
    data = {"label": LABELS} if what == "data" and rank else {}
    parameters = {"a": torch.ones(3) * (1 + rank)} if what == "parameter" else {}
    x = None if what == "no features" and rank else X
    loss_fn(x, x_data=data, parameters=parameters)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("captured value", """must be the same on all ranks, got rank 0: {"score of 't'": '"""),
        ("code", "the fingerprint of the declared functions, with the values that they capture,"),
        ("data", "the arguments that are given"),
        ("parameter", "parameters['a']"),
        ("no features", "x must be a tensor"),
    ],
)
def test_ranks_that_differ_raise_on_all(what, message):
    with pytest.raises(RankError, match="2 of 2 ranks failed") as error:
        run_ranks(differing, 2, what)
    assert str(error.value).count(message) >= 2


class OfClass:
    prior = 1.0


class Slotted:
    __slots__ = ("prior",)


@dataclasses.dataclass
class Listed:
    priors: list = dataclasses.field(default_factory=lambda: [1.0])


AWAY = [1.0]  # of a rank's number from that of the one before


def hidden_numbers(away):
    """Return functions that read a number 1 + away where no fingerprint sees it, by where that is."""
    number = 1.0 + away
    array, single = np.array([number]), np.float32(number)
    decimal, fraction = Decimal(repr(number)), Fraction(number)
    space = SimpleNamespace(prior=ctypes.c_double(number))
    slotted, listed, row_array = Slotted(), Listed([ctypes.c_double(number)]), np.array([number])
    slotted.prior, OfClass.prior, os.environ["PRIOR"] = number, number, repr(number)
    buffer, queue = bytearray(struct.pack("d", number)), deque([number])
    long = [0.0] * 1001 + [number] + [0.0] * 1001
    steps = range(round(number))
    scores = {
        "numpy array": lambda s, x, y, p: s * float(array[0]),
        "numpy.float32": lambda s, x, y, p: s * float(single),
        "Decimal": lambda s, x, y, p: s * float(decimal),
        "Fraction": lambda s, x, y, p: s * float(fraction),
        "namespace": lambda s, x, y, p: s * space.prior.value,
        "slots": lambda s, x, y, p: s * slotted.prior,
        "dataclass": lambda s, x, y, p: s * listed.priors[-1].value,
        "class attribute": lambda s, x, y, p: s * OfClass.prior,
        "environment": lambda s, x, y, p: s * float(os.environ["PRIOR"]),
        "bytearray": lambda s, x, y, p: s * struct.unpack("d", buffer)[0],
        "deque": lambda s, x, y, p: s * queue[0],
        "long list": lambda s, x, y, p: s * long[1001],
        "range": lambda s, x, y, p: s * len(steps),
        "rank": lambda s, x, y, p: s + dist.get_rank() * AWAY[0],
    }
    losses = {name: declared(score) for name, score in scores.items()}
    losses["mask"] = declared(None, where=lambda x, y, s: s > 0.5 * float(array[0]))
    losses["log_weight"] = wb.PairLoss({"t": wb.terms.Mean(log_weight=lambda s, x, y, p: s * float(array[0]))}, read)
    losses["row_loss"] = declared(row_loss=lambda r, x, p: r.t * float(row_array[0]))
    losses["column_loss"] = declared(row_loss=None, column_loss=lambda r, y, p: r.t * float(row_array[0]))
    return losses


def errors_of_hidden_numbers(away):
    found, AWAY[0] = {}, away
    for name, loss_fn in hidden_numbers(dist.get_rank() * away).items():
        try:
            loss_fn(X)
            loss_fn(X)
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.planted
def test_functions_that_differ_where_no_fingerprint_sees_it():
    for found in run_ranks(errors_of_hidden_numbers, 3, 1.0):
        assert {*found} == {*hidden_numbers(0.0)}
        assert all(" must compute alike on all ranks, got " in message for message in found.values()), found
        score = "PairLoss: term 't' must compute alike on all ranks, got 0.2 on rank 0 and 0.4 on rank 1"
        assert found["numpy array"].startswith(score)
        assert found["mask"].startswith("PairLoss: term 't' must compute alike on all ranks, got 1.0 on rank 0")
        assert found["row_loss"].startswith("PairLoss: row_loss must")


def test_functions_that_differ_by_rounding_go_on():
    assert run_ranks(errors_of_hidden_numbers, 2, 1e-7) == [{}, {}]


def test_the_same_program_has_the_same_fingerprint():
    for found in run_ranks(fingerprints, 2):
        assert found == fingerprints()


def fingerprints():
    from wholebatch.pair_loss.fingerprint import fingerprint

    made = [make() for make, _ in DECLARATIONS.values()]
    return [fingerprint(*of.declaration.functions) for of in made]


def weights_on_one_rank():
    rank = dist.get_rank()
    whole = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)
    x = whole[4 * rank : 4 * rank + 4].clone().requires_grad_()
    terms = {"all": wb.terms.LogSumExp()}
    loss_fn = wb.PairLoss(terms, lambda r, x, p: (r.all, 0.25 * x.one) if bool((x.one > 1.5).any()) else r.all)
    loss = loss_fn(x, x_data={"one": torch.full((4,), 1.0 + rank, dtype=torch.float64)})
    loss.backward()
    every = whole.requires_grad_()
    weights = torch.tensor(4 * [1.0] + 4 * [0.5], dtype=torch.float64)
    expected = ((every @ every.T).logsumexp(1) * weights).sum() / weights.sum()
    return loss.item(), expected.item(), x.grad / 2, torch.autograd.grad(expected, every)[0][4 * rank : 4 * rank + 4]


def test_rows_have_weight_1_where_only_other_ranks_return_weights():
    (first, expected, *_), (second, _, *_) = results = run_ranks(weights_on_one_rank, 2)
    assert first == second == pytest.approx(expected, rel=1e-12)
    for *_, grad, dense in results:
        torch.testing.assert_close(grad, dense, rtol=1e-10, atol=1e-12)
