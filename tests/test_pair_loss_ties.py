"""Similarities that equal that of a partner, up to rounding, count as equal to it: copies of a key are no closer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.pair_loss import pairs
from wholebatch.testing import run_ranks

COUNTS = [(64,), (13, 20, 31)]
SMALL = 2 * 7 * 7 * 8  # bytes of two tiles of 7 x 7 numbers in float64: the last tiles are ragged


def row(r, x, p):
    return r.t


def local(counts, *tensors):
    """Return the rows of this rank."""
    first = sum(counts[: dist.get_rank()])
    return [x[first : first + counts[dist.get_rank()]].detach().requires_grad_(x.is_floating_point()) for x in tensors]


def semi_hard_body(counts):
    x = torch.tensor([[-1.0], [1], [1], [1], [1]], dtype=torch.float64)
    y = torch.tensor([[1.0], [-1], [-1], [-1], [1]], dtype=torch.float64)
    loss_fn = wb.PairLoss(
        {
            "t": wb.terms.Mean(
                lambda s, x, y, p: s - x.partner + p.margin,
                where=lambda x, y, s, p: (x.index != y.index) & (s < x.partner) & (s > x.partner - p.margin),
            )
        },
        row,
        similarity="neg_squared_distance",
        parameters={"margin": 5.0},
    )
    return loss_fn(*local(counts, x, y)).detach(), loss_fn.reference(x, y)


@pytest.mark.parametrize("counts", [(5,), (2, 0, 3)])
def test_semi_hard_negatives_are_farther_than_the_pair(counts):
    """Only row 0's column 4 and column 4's like count: -4 + 4 + 1 of 5 rows."""
    for found in run_ranks(semi_hard_body, len(counts), counts, timeout_s=40):
        assert all(torch.allclose(one, torch.tensor(0.2, dtype=torch.float64)) for one in found)


def guided_data(dtype):
    """Return features and guides of 64 pairs, whose texts occur twice, and which texts are equal."""
    torch.manual_seed(0)
    queries, guides = torch.randn(2, 64, 512, dtype=dtype)
    texts, text_guides = torch.randn(2, 32, 512, dtype=dtype).repeat(1, 2, 1)
    guides = guides + text_guides  # in the middle of the similarities of others
    same = torch.arange(64) % 32
    return queries + texts, texts, guides, text_guides, same[:, None] == same


def guided_body(counts, dtype):
    queries, texts, guides, text_guides, _ = guided_data(dtype)
    loss_fn = wb.PairLoss(
        {
            "negatives": wb.terms.LogSumExp(
                lambda s, x, y, p: 20.0 * (s.features - x.partner.features),
                where=lambda x, y, s: (s.guide <= x.partner.guide) & (x.index != y.index),
            )
        },
        lambda r, x, p: torch.nn.functional.softplus(r.negatives),
        similarity={"features": "cosine", "guide": "cosine"},
        memory=SMALL,
    )
    q, t, g, h = local(counts, queries, texts, guides, text_guides)
    loss = loss_fn({"features": q, "guide": g}, {"features": t, "guide": h})
    loss.backward()
    whole = loss_fn.reference({"features": queries, "guide": guides}, {"features": texts, "guide": text_guides})
    return loss.detach(), whole, q.grad, t.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_text_that_occurs_twice_is_no_more_similar_than_itself(counts, dtype):
    """GISTEmbed's formula, with exact ties: a copy of the key is as similar to the guide, and stays a negative."""
    queries, texts, guides, text_guides, same = guided_data(torch.float64)
    if dtype == torch.float32:
        queries, texts, guides, text_guides = (x.double() for x in guided_data(dtype)[:4])
    queries.requires_grad_(), texts.requires_grad_()
    guide = normalize(guides) @ normalize(text_guides).T
    more = (guide > guide.diagonal()[:, None]) & ~same
    logits = (20 * normalize(queries) @ normalize(texts).T).masked_fill(more, float("-inf"))
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(64))
    expected.backward()
    close = 1e-10 if dtype == torch.float64 else 1e-4
    ranks = run_ranks(guided_body, len(counts), counts, dtype, timeout_s=60)
    for loss, whole, _, _ in ranks:
        assert abs(loss - expected.detach()) < close
        assert abs(whole.double() - expected.detach()) < close
    for at, of in ((2, queries), (3, texts)):
        found = torch.cat([rank[at] for rank in ranks]) / len(counts)  # sync="mean"
        assert (found - of.grad).abs().max() < close
    without_copies = logits.detach().masked_fill(same & ~torch.eye(64, dtype=torch.bool), float("-inf"))
    assert abs(torch.nn.functional.cross_entropy(without_copies, torch.arange(64)) - expected) > 0.01


def copies_body(counts, similarity, dtype):
    torch.manual_seed(1)
    shape = (64, 3, 512) if similarity == "max_sim" else (64, 512)
    x, y = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)[torch.arange(64) % 32]
    terms = {
        "more": wb.terms.Count(lambda x, y, s: s > x.partner),
        "equal": wb.terms.Count(lambda x, y, s: s == x.partner),
        "seen_by_columns": wb.terms.Count(lambda x, y, s: s == y.partner),
    }
    losses = [wb.PairLoss({"t": term}, row, similarity=similarity, memory=SMALL) for term in terms.values()]
    return [[float(loss_fn(*local(counts, x, y)).detach()), float(loss_fn.reference(x, y))] for loss_fn in losses]


@pytest.mark.parametrize("similarity", ["dot", "cosine", "neg_squared_distance", "max_sim"])
def test_copies_of_a_key_are_equal(similarity):
    for dtype in (torch.float64, torch.float32):
        for more, equal, of_columns in run_ranks(copies_body, 3, COUNTS[1], similarity, dtype, timeout_s=60):
            assert more[0] == more[1]
            assert equal == [2.0, 2.0]
            assert of_columns == [1.0, 1.0]


def test_gradients_are_those_of_the_similarity():
    torch.manual_seed(2)
    x, y = torch.randn(12, 512, dtype=torch.float64), torch.randn(6, 512, dtype=torch.float64).repeat(2, 1)
    x.requires_grad_(), y.requires_grad_()
    loss_fn = wb.PairLoss(
        {"t": wb.terms.Sum(lambda s, x, y, p: s * s, lambda x, y, s: s >= x.partner)}, row, memory=2 * 5 * 5 * 8
    )
    s = x @ y.T
    same = torch.arange(12) % 6
    kept = (s > s.diagonal()[:, None]) | (same[:, None] == same)
    expected = torch.autograd.grad((s.square() * kept).sum(1).mean(), (x, y))
    for loss in (loss_fn(x, y), loss_fn.reference(x, y)):
        for found, of in zip(torch.autograd.grad(loss, (x, y)), expected, strict=True):
            assert torch.allclose(found, of)


def test_a_loss_without_partners_does_not_pay(monkeypatch):
    def refuse(*_):
        raise AssertionError("rounding was computed")

    monkeypatch.setattr(pairs, "rounding", refuse)
    x = torch.randn(6, 4)
    terms = {"t": wb.terms.LogSumExp(where=lambda x, y, s: s > 0), "own": wb.terms.Partner()}
    assert wb.PairLoss(terms, lambda r, x, p: r.t - r.own + x.partner)(x, x).isfinite()
    affine = {
        "t": wb.terms.LogSumExp(lambda s, x, y, p: 2 * (s - x.partner)),
        "own": wb.terms.Partner(lambda s, x, y, p: s * s),
    }
    assert wb.PairLoss(affine, lambda r, x, p: r.t - r.own)(x, x).isfinite()
    with pytest.raises(AssertionError, match="rounding was computed"):
        wb.PairLoss({"t": wb.terms.Sum(where=lambda x, y, s: s > x.partner)}, row)(x, x)
