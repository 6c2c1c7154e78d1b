"""Tiles of late interaction: maxima, winners and gradients, with padded documents as on a GPU and without."""

import pytest
import torch

import wholebatch as wb
from wholebatch.partition import Partition, Ragged, Tile
from wholebatch.sweep import Block, MaxSimDriver, Products, TokenBudget, max_sim

LENGTHS = {
    "from 1 to 40": tuple(range(1, 41)),
    "one token each": (1,) * 7,
    "one long one": (1, 300, 2, 1, 17, 40),
    "equal": (9,) * 6,
}


def tokens(lengths, d=7, *, dtype=torch.float64, seed=0):
    """Return the vectors of items: whole numbers, whose products are exact, and many of them equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (sum(lengths), d), generator=generator).to(dtype)


def expected(queries, documents, of_queries, of_documents):
    """Return S, and the first token that wins in each document for each query token."""
    products = [queries @ d.T for d in documents.split(of_documents)]
    best = torch.stack([found.amax(1) for found in products], 1)
    winners = torch.stack([found.max(1).indices for found in products], 1)
    return torch.stack([one.sum(0) for one in best.split(of_queries)]), winners


def tile_of(x, y, of_rows, of_cols, *, documents="columns", entries=2**20, kind=MaxSimDriver):
    """Return a driver of all rows and columns, S of the one tile, its winners, and dX and dY for dS = S."""
    rows, cols = (Ragged(Partition((len(of),)), tuple(of)) for of in (of_rows, of_cols))
    driver = kind(
        x, rows, cols, documents=documents, budget=TokenBudget(640, 0, torch.uint8, entries),
        largest=(len(of_rows), len(of_cols)), products=Products(), winners=True,
    )  # fmt: skip
    tile = Tile(slice(0, len(of_rows)), slice(0, len(of_cols)))
    block = Block(y, tile.cols, tile.rows)
    factors = driver.factors(tile, block)
    s = driver.logits(tile, *factors).clone()
    winners = driver._winners.clone()
    u, v = (torch.zeros(z.shape, dtype=driver.dtype) for z in (x, y))
    driver.products(s.clone(), tile, *factors, block, u, v)
    return driver, s, winners.long(), u, v


@pytest.fixture(params=[False, True], ids=["lengths", "padded"])
def pads(request, monkeypatch):
    """Let a CPU pad documents, as a GPU does."""
    monkeypatch.setattr(max_sim, "pads", lambda device: request.param)
    return request.param


@pytest.mark.parametrize("documents", ["columns", "rows"])
@pytest.mark.parametrize("entries", [2**20, 500])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_maxima_winners_and_gradients(pads, lengths, entries, documents):
    of_queries = (3, 1, 8, 2)
    queries, texts = tokens(of_queries, seed=1), tokens(lengths)
    given = (queries, texts, of_queries, lengths)
    true_s, true_winners = expected(*given)
    if documents == "rows":
        given = (texts, queries, lengths, of_queries)
    _, s, winners, u, v = tile_of(*given, documents=documents, entries=entries)
    assert torch.equal(winners, true_winners)
    s, u, v = (s, u, v) if documents == "columns" else (s.T, v, u)
    torch.testing.assert_close(s, true_s, rtol=0, atol=1e-13)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    chosen, weights = texts[winners + starts], true_s.repeat_interleave(torch.tensor(of_queries), 0)
    torch.testing.assert_close(u, (weights[..., None] * chosen).sum(1), rtol=0, atol=1e-10)
    of_texts = torch.zeros_like(texts)
    of_texts.index_add_(0, (winners + starts).flatten(), (weights[..., None] * queries[:, None]).flatten(0, 1))
    torch.testing.assert_close(v, of_texts, rtol=0, atol=1e-10)


def products_of(lengths, monkeypatch):
    """Return how many products the maxima of a tile take."""
    found = []
    multiply = Products.multiply
    monkeypatch.setattr(Products, "multiply", lambda *of, **more: (found.append(1), multiply(*of, **more))[1])
    maxima = []
    amax = torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda *of: (maxima.append(1), amax(*of))[1])
    tile_of(tokens((4, 4)), tokens(lengths), (4, 4), lengths)
    monkeypatch.undo()
    return len(found), len(maxima)


def test_a_gpu_starts_as_much_for_many_documents_as_for_few(monkeypatch):
    for count in (10, 200):
        lengths = tuple(1 + 7 * k % 40 for k in range(count))
        assert products_of(lengths, monkeypatch) == (1, count)
        monkeypatch.setattr(max_sim, "pads", lambda device: True)
        assert products_of(lengths, monkeypatch) == (1, 1)


def test_padding_is_at_most_half_of_many_tokens(monkeypatch):
    """A long document beside short ones has a part of its own."""
    monkeypatch.setattr(max_sim, "pads", lambda device: True)
    lengths = (*range(1, 41), 5000, *range(1, 41))
    driver, *_ = tile_of(tokens((4, 4)), tokens(lengths), (4, 4), lengths)
    of = Ragged(Partition((len(lengths),)), lengths)
    parts = {(some.start, some.stop) for _, some in driver._parts(8, of)}
    assert sum((stop - start) * max(lengths[start:stop]) for start, stop in parts) <= 2 * sum(lengths) + 4096
    assert len(parts) == 3


def test_the_last_of_equal_tokens_is_another_answer():
    """The tests of winners see which of equal tokens has won."""
    lengths = (2, 3, 40)
    queries, texts = tokens((3, 1), seed=1), tokens(lengths)
    _, winners = expected(queries, texts, (3, 1), lengths)
    flipped = torch.stack([len(d) - 1 - (queries @ d.flip(0).T).max(1).indices for d in texts.split(lengths)], 1)
    assert not torch.equal(flipped, winners)


def test_a_loss_does_not_depend_on_padding(pads):
    lengths, of_queries = (1, 40, 3, 17), (2, 5, 1, 4)
    given = [tokens(of, seed=seed) for seed, of in enumerate((of_queries, lengths))]
    offsets = [torch.tensor([0, *of]).cumsum(0) for of in (of_queries, lengths)]
    found = []
    for loss in (wb.functional.max_sim_loss, wb.reference.max_sim_loss):
        leaves = [z.clone().requires_grad_() for z in given]
        value = loss(*leaves, logit_scale=2.0, query_offsets=offsets[0], document_offsets=offsets[1])
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for got, true in zip(*found, strict=True):
        torch.testing.assert_close(got, true, rtol=0, atol=1e-12)
