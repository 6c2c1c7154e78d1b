"""wb.PairLoss: declared losses have the value and the gradients of one dense matrix, on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from pair_losses import DECLARATIONS, batch_for, cut, gradients, leaves, part
from torch.utils.flop_counter import FlopCounterMode

import wholebatch as wb
from wholebatch.sweep import Driver
from wholebatch.testing import run_ranks

SPLITS = [(7,), (4, 3), (0, 5, 2), (1, 3, 0, 3)]


def of_rank(jobs):
    """Return loss and gradients of this rank's part of each batch."""
    found = []
    for name, counts, seed, options in jobs:
        batch = batch_for(name, sum(counts), sum(counts), seed)
        at = cut(counts, dist.get_rank())
        found.append(gradients(DECLARATIONS[name](**options), part(batch, at, at)))
    return found


def distance(found, batch, expected, counts, sync):
    """Return the largest difference of value and gradients, relative to the largest of these."""
    value, grads = expected
    largest = max([1e-2, *(grad.abs().max().item() for grad in grads.values())])
    most = max(abs(of_rank[0] - value).item() / max(1, abs(value).item()) for of_rank in found)
    for name in leaves(batch):
        parts = [of_rank[1][name] for of_rank in found]
        if name.startswith("parameters"):
            got = parts[0] if sync == "mean" else sum(parts)
        else:
            got = torch.cat(parts) / (len(counts) if sync == "mean" else 1)
        most = max(most, (got - grads[name]).abs().max().item() / largest)
    return most


@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_ranks_have_the_gradients_of_one_dense_matrix(counts):
    options = [{"exchange": "gather"}, {"exchange": "ring"}, {"exchange": "ring", "sync": "sum"}, {"memory": 128}]
    options += [{"memory": 2**22, "exchange": "ring"}]  # keeps all products
    jobs = [(name, counts, seed % 4, option) for name in DECLARATIONS for seed, option in enumerate(options)]
    found = run_ranks(of_rank, len(counts), jobs)
    for at, (name, _, seed, option) in enumerate(jobs):
        batch = batch_for(name, sum(counts), sum(counts), seed)
        loss_fn = DECLARATIONS[name](**option)
        expected = gradients(loss_fn.reference, batch)
        error = distance([of[at] for of in found], batch, expected, counts, option.get("sync", "mean"))
        assert error < 1e-10, (name, option, error)


@pytest.mark.parametrize("symmetric", [False, True])
def test_kept_products_are_not_computed_again(symmetric):
    x = torch.randn(1000, 16, requires_grad=True)
    found = {}
    for memory in ("flat", 2**24):
        loss_fn = wb.PairLoss({"all": wb.terms.LogSumExp()}, lambda r, x, p: r.all, symmetric=symmetric, memory=memory)
        loss_fn(x)  # its first use computes small tiles as well
        x.grad = None
        with FlopCounterMode(display=False) as counter:  # which counts products of tiles, not sums of gradients
            loss = loss_fn(x)
            forward = counter.get_total_flops()
            loss.backward(retain_graph=True)
        again = counter.get_total_flops() - forward
        assert again == (forward if memory == "flat" else 0)
        found[memory] = x.grad.clone()
        x.grad = None
        loss.backward()
        assert torch.equal(x.grad, found[memory])
    assert torch.allclose(found["flat"], found[2**24], rtol=1e-5, atol=1e-8)


SYMMETRIC = ["multi_similarity", "hard_triplet", "sup_con"]


@pytest.mark.parametrize("counts", [*SPLITS, (3, 3, 3, 3)], ids=str)
def test_half_of_a_symmetric_matrix_suffices(counts):
    options = [{"exchange": "gather"}, {"exchange": "ring"}, {"memory": 128}]
    numbered = [*enumerate(options)]
    jobs = [(name, counts, seed, {"symmetric": True, **option}) for name in SYMMETRIC for seed, option in numbered]
    found = run_ranks(of_rank, len(counts), jobs)
    for at, (name, _, seed, option) in enumerate(jobs):
        batch = batch_for(name, sum(counts), sum(counts), seed)
        expected = gradients(DECLARATIONS[name]().reference, batch)
        assert distance([of[at] for of in found], batch, expected, counts, "mean") < 1e-10, (name, option)


# Entries that are no candidates, and rows without any.


def masked_out(score, similarity="dot"):
    return wb.PairLoss(
        {"sum": wb.terms.Sum(score, where=lambda x, y: x.index != y.index)},
        lambda r, x, p: r.sum,
        similarity=similarity,
    )


@pytest.mark.parametrize(
    ("score", "similarity"),
    [
        (lambda s, x, y, p: (1 - s).log(), "cosine"),
        (lambda s, x, y, p: (-s).sqrt(), "neg_squared_distance"),
        (lambda s, x, y, p: 1 / s, "neg_squared_distance"),
        (lambda s, x, y, p: s / x.nan_at_one, "dot"),
    ],
)
def test_no_nan_of_an_entry_that_is_no_candidate_enters_a_gradient(score, similarity):
    """On the diagonal, which is masked, each score or its slope is infinite or NaN."""
    z = torch.randn(5, 3, dtype=torch.float64)
    z = (z / z.norm(dim=1, keepdim=True)).requires_grad_()
    loss_fn = masked_out(score, similarity)
    data = {"nan_at_one": torch.ones(5, dtype=torch.float64)}
    loss_fn(z, x_data=data).backward()
    assert z.grad.isfinite().all()
    found, z.grad = z.grad, None
    loss_fn.reference(z, x_data=data).backward()
    assert torch.allclose(found, z.grad, rtol=0, atol=1e-10)


def test_data_of_entries_that_are_no_candidates_enter_no_gradient():
    """A row that is nobody's candidate has data that are NaN; the parameter that multiplies them has a gradient."""
    z, bad = torch.randn(4, 3, dtype=torch.float64), torch.tensor([1.0, 2.0, float("nan"), 3.0], dtype=torch.float64)
    loss_fn = wb.PairLoss(
        {"sum": wb.terms.Sum(lambda s, x, y, p: p.a * s * y.price, where=lambda x, y: y.price == y.price)},
        lambda r, x, p: r.sum,
    )
    a, b = torch.tensor([2.0], dtype=torch.float64, requires_grad=True), bad.clone().requires_grad_()
    loss_fn(z, z, y_data={"price": b}, parameters={"a": a}).backward()
    some = [0, 1, 3]
    assert torch.allclose(a.grad, (z @ z[some].T * bad[some]).sum() / 4)
    assert b.grad[2] == 0
    assert torch.allclose(b.grad[some], 2 * (z @ z[some].T).sum(0) / 4)


@pytest.mark.parametrize(
    ("term", "value"),
    [
        (wb.terms.LogSumExp, -torch.inf),
        (wb.terms.Max, -torch.inf),
        (wb.terms.Min, torch.inf),
        (wb.terms.Sum, 0),
        (wb.terms.Mean, 0),
        (wb.terms.Count, 0),
    ],
)
def test_over_no_candidates(term, value):
    """Row 1 has none: its value is that of the table, and the gradient of its features is exactly 0."""

    def someone(x, y):
        return x.index != 1

    made = term(where=someone) if term is wb.terms.Count else term(lambda s, x, y, p: s, where=someone)
    seen = []

    def row_loss(r, x, p):
        seen.append(r.t.detach())
        return torch.where(r.t.isinf(), 0.0, r.t)

    x, y = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = wb.PairLoss({"t": made}, row_loss)(x, y)
    assert seen[-1][1] == value
    assert (seen[-1][[0, 2]] != value).all()
    if loss.requires_grad:
        loss.backward()
        assert (x.grad[1] == 0).all()


def test_a_score_of_minus_infinity_is_no_candidate():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def declared(score, where=None):
        return wb.PairLoss(
            {"a": wb.terms.LogSumExp(score, where), "b": wb.terms.Max(score, where)}, lambda r, x, p: r.a + r.b
        )

    by_score = declared(lambda s, x, y, p: torch.where(x.index == y.index, -torch.inf, s))(x)
    by_mask = declared(lambda s, x, y, p: s, lambda x, y: x.index != y.index)(x)
    (of_score,), (of_mask,) = (torch.autograd.grad(loss, x) for loss in (by_score, by_mask))
    assert torch.equal(by_score, by_mask)
    assert torch.allclose(of_score, of_mask, rtol=0, atol=1e-12)


def test_the_distance_of_a_row_from_itself_is_not_positive():
    """Products round it to either side of 0: the root of a positive similarity is NaN."""
    z = 100 + torch.randn(64, 16)
    loss_fn = wb.PairLoss(
        {"sum": wb.terms.Sum(lambda s, x, y, p: (-s).sqrt())}, lambda r, x, p: r.sum, similarity="neg_squared_distance"
    )
    found, expected = loss_fn(z), loss_fn.reference(z)
    assert found.isfinite()
    assert torch.allclose(found, expected, rtol=1e-3)


def guided(**options):
    return wb.PairLoss(
        {"a": wb.terms.Mean(lambda s, x, y, p: s.features, log_weight=lambda s, x, y, p: 3 * s.guide)},
        lambda r, x, p: r.a,
        similarity={"features": "dot", "guide": "cosine"},
        **options,
    )


def of_guides(learned, part=slice(None)):
    """Return features and guides of six rows, and as many columns; guides are learned or not."""
    g = torch.Generator().manual_seed(0)
    sides = [{name: torch.randn(6, 4, generator=g).double()[part] for name in ("features", "guide")} for _ in range(2)]
    for side in sides:
        side["features"].requires_grad_()
        side["guide"].requires_grad_(learned)
    return sides


def test_frozen_features_take_no_products_of_gradients(monkeypatch):
    products, calls = Driver.products, []
    monkeypatch.setattr(Driver, "products", lambda *arguments: calls.append(0) or products(*arguments))
    counts = []
    for learned in (True, False):
        calls.clear()
        guided()(*of_guides(learned)).backward()
        counts.append(len(calls))
    assert counts == [2, 1]


def guides_of_one_rank():
    """Return the gradients of guides that are learned on rank 1 alone."""
    rank = torch.distributed.get_rank()
    x, y = of_guides(rank == 1, slice(3 * rank, 3 * rank + 3))
    guided(sync="sum")(x, y).backward()
    return x["guide"].grad, y["guide"].grad


def test_guides_that_one_rank_learns_get_the_parts_of_all_rows():
    x, y = of_guides(True)
    guided().reference(x, y).backward()
    first, second = run_ranks(guides_of_one_rank, 2, timeout_s=60)
    assert first == (None, None)
    for got, side in zip(second, (x, y), strict=True):
        assert torch.allclose(got, side["guide"].grad[3:], rtol=1e-10)
