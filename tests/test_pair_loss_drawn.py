"""Declarations drawn from a grammar equal autograd on the dense matrix, on one, two and three ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from pair_grammar import drawn
from pair_losses import cut, gradients, part
from test_pair_loss import distance

import wholebatch as wb
from wholebatch.nodes import matrix
from wholebatch.testing import run_ranks

COUNT = 300 if os.environ.get("WHOLEBATCH_TEST_PAIRS") == "all" else 60
OPTIONS = ({"exchange": "gather"}, {"exchange": "ring"}, {"memory": 512}, {"exchange": "ring", "sync": "sum"})
SPLITS = {1: [(6,), (1,)], 2: [(3, 4), (0, 1), (7, 0)], 3: [(2, 0, 4), (1, 1, 1), (0, 0, 1)]}


def cases(world):
    return [(seed, SPLITS[world][seed % len(SPLITS[world])], OPTIONS[seed % len(OPTIONS)]) for seed in range(COUNT)]


def of_rank(world):
    found = []
    for seed, counts, options in cases(world):
        declaration, batch = drawn(seed, sum(counts))
        at = cut(counts, dist.get_rank())
        try:
            found.append(gradients(wb.PairLoss(**declaration, **options), part(batch, at, at)))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {counts}") from error
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_drawn_declarations_equal_the_dense_matrix(world):
    found = run_ranks(of_rank, world, world, timeout_s=300)
    wrong = []
    for at, (seed, counts, options) in enumerate(cases(world)):
        declaration, batch = drawn(seed, sum(counts))
        expected = gradients(wb.PairLoss(**declaration).reference, batch)
        error = distance([of[at] for of in found], batch, expected, counts, options.get("sync", "mean"))
        if not error < 1e-10:
            wrong.append((seed, counts, options, error))
    assert not wrong


@pytest.mark.parametrize("memory", ["auto", "flat"])
def test_late_interaction_equals_the_dense_matrix(monkeypatch, memory):
    """With "auto" in one matrix, also of partners; with "flat" in tiles."""
    made, apply = [], matrix.Matrix.apply
    monkeypatch.setattr(matrix.Matrix, "apply", lambda *of: made.append(of) or apply(*of))
    wrong = []
    for seed in range(COUNT):
        declaration, batch = drawn(seed, 5, "max_sim")
        expected = gradients(wb.PairLoss(**declaration).reference, batch)
        value, grads = gradients(wb.PairLoss(**declaration, memory=memory), batch)
        errors = [value - expected[0], *(grads[name] - true for name, true in expected[1].items())]
        if not max(float(error.abs().max()) for error in errors) < 1e-10:
            wrong.append(seed)
    assert not wrong
    assert len(made) > COUNT / 2 if memory == "auto" else not made


def test_a_score_of_minus_infinity_is_no_candidate_of_a_matrix():
    """Its gradient is 0, also where a row has no other."""
    q, d = (torch.randn(3, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    far = torch.tensor([0.0, float("-inf"), float("-inf")], dtype=torch.float64)
    for term in (wb.terms.LogSumExp, lambda score: wb.terms.Max(score, ties="split")):
        declaration = {"a": term(lambda s, x, y, p: s + x.far)}, lambda r, x, p: r.a.clamp(min=-9.0)
        found = []
        for memory in ("auto", "flat"):
            q.grad = d.grad = None
            loss = wb.PairLoss(*declaration, similarity="max_sim", memory=memory)(q, d, x_data={"far": far})
            loss.backward()
            found.append((loss.detach(), q.grad, d.grad))
            assert not q.grad[1:].any()
            assert q.grad[0].any()
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-13)
