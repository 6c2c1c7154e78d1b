"""Tiles of late interaction: maxima, winners and gradients, with padded documents as on a GPU and without."""

import importlib
import importlib.util
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.exchange import USED_EXCHANGES
from wholebatch.kernels import choice
from wholebatch.partition import Partition, Ragged, Tile
from wholebatch.sweep import Block, KernelMaxSimDriver, MaxSimDriver, Products, TokenBudget, max_sim, token_budget
from wholebatch.testing import run_ranks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

LENGTHS = {
    "from 1 to 40": tuple(range(1, 41)),
    "one token each": (1,) * 7,
    "one long one": (1, 300, 2, 1, 17, 40),
    "equal": (9,) * 6,
}


def tokens(lengths, d=7, *, dtype=torch.float64, seed=0):
    """Return the vectors of items: whole numbers, whose products are exact, and many of them equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (sum(lengths), d), generator=generator).to(DEVICE, dtype)


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
    winners = driver.winners.clone()
    u, v = (torch.zeros(z.shape, dtype=driver.dtype, device=z.device) for z in (x, y))
    driver.products(s.clone(), tile, *factors, block, u, v)
    return driver, s, winners.long(), u, v


@pytest.fixture(params=[False, True], ids=["lengths", "padded"])
def pads(request, monkeypatch):
    """Let a CPU pad documents, as a GPU does."""
    set_padding(monkeypatch, pads=request.param)
    return request.param


def set_padding(monkeypatch, *, pads):
    for module in (max_sim, token_budget):
        monkeypatch.setattr(module, "pads", lambda device: pads)


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
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)[:-1]
    chosen, weights = texts[winners + starts], true_s.repeat_interleave(torch.tensor(of_queries, device=DEVICE), 0)
    torch.testing.assert_close(u, (weights[..., None] * chosen).sum(1), rtol=0, atol=1e-10)
    of_texts = torch.zeros_like(texts)
    of_texts.index_add_(0, (winners + starts).flatten(), (weights[..., None] * queries[:, None]).flatten(0, 1))
    torch.testing.assert_close(v, of_texts, rtol=0, atol=1e-10)


def products_of(lengths, monkeypatch, *, pads):
    """Return how many products and maxima a tile takes."""
    found = []
    set_padding(monkeypatch, pads=pads)
    monkeypatch.setattr(max_sim, "finite", lambda x, y: False)  # maxima by `Tensor.max`
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
        assert products_of(lengths, monkeypatch, pads=False) == (1, count)
        assert products_of(lengths, monkeypatch, pads=True) == (1, 1)


def test_padding_is_at_most_half_of_many_tokens(monkeypatch):
    """A long document beside short ones has a part of its own."""
    set_padding(monkeypatch, pads=True)
    lengths = (*range(1, 41), 5000, *range(1, 41))
    driver, *_ = tile_of(tokens((4, 4)), tokens(lengths), (4, 4), lengths)
    of = Ragged(Partition((len(lengths),)), lengths)
    parts = {(some.start, some.stop) for _, some in driver._parts(8, of)}
    assert sum((stop - start) * max(lengths[start:stop]) for start, stop in parts) <= 2 * sum(lengths) + 4096
    assert len(parts) == 3


@pytest.mark.planted
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


# Kernels, in Triton's interpreter where there is no GPU.


@needs_triton
@pytest.mark.parametrize("documents", ["columns", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("d", "entries"), [(7, 2**20), (40, 800)]
)  # features in one step or in two; one launch or many
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_kernels_have_the_same_maxima_winners_and_gradients(monkeypatch, lengths, d, entries, dtype, documents):
    """Maxima have the same bits, because products of whole numbers are exact."""
    of_queries = (3, 1, 28, 2)
    queries, texts = tokens(of_queries, d, dtype=dtype, seed=1), tokens(lengths, d, dtype=dtype)
    given = (queries, texts, of_queries, lengths)
    if documents == "rows":
        given = (texts, queries, lengths, of_queries)
    true = tile_of(*given, documents=documents)[1:]
    for name in ("_maxima", "_scatter"):  # plain PyTorch's
        monkeypatch.setattr(MaxSimDriver, name, None)
    found = tile_of(*given, documents=documents, entries=entries, kind=KernelMaxSimDriver)[1:]
    for got, wanted in zip(found[:2], true[:2], strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(found[2:], true[2:], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-3)


def ragged_loss(functions, given, lengths, **more):
    """Return the loss of packed tokens, and its gradients."""
    leaves = [z.clone().requires_grad_() for z in given]
    offsets = [torch.tensor([0, *of]).cumsum(0) for of in lengths]
    more = {"query_offsets": offsets[0], "document_offsets": offsets[1], **more}
    loss = functions.max_sim_loss(
        *leaves, logit_scale=2.0, directions=("query_to_document", "document_to_query"), **more
    )
    loss.backward()
    return loss.detach(), [z.grad for z in leaves]


def rounding(convert):
    """Return the interpreter's conversion of numbers that rounds to bfloat16 as a GPU does, instead of truncating."""

    def converted(numbers, source, target, mode):
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(numbers, source, target, mode)
        return torch.tensor(numbers).bfloat16().view(torch.int16).numpy().view("uint16")

    return converted


def on_ranks(counts):
    """Return the errors of a call in kernels whose weights are rounded: see `errors_on_ranks`."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    with mock.patch.object(interpreter, "_convert_float", rounding(interpreter._convert_float)):
        return errors_on_ranks(counts)


def errors_on_ranks(counts):
    """Return the errors of a loss in kernels, by both exchanges, in two precisions, with either tower staying."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    found = {}
    for exchange, precision, longest in product(USED_EXCHANGES, ("float32", "bfloat16"), ((6, 40), (40, 6))):
        lengths = [torch.randint(1, most + 1, (sum(counts),), generator=generator) for most in longest]
        whole = [normalize(torch.randn(int(of.sum()), 40, generator=generator), dim=1) for of in lengths]
        if precision == "bfloat16":
            whole = [z.bfloat16().float() for z in whole]
        texts = [z.split(of.tolist()) for z, of in zip(whole, lengths, strict=True)]
        at = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        value, grads = ragged_loss(wb.reference, [z.double() for z in whole], lengths)
        true = [torch.cat([g[:0], *g.split(of.tolist())[at]]) for g, of in zip(grads, lengths, strict=True)]
        mine = [torch.cat([z[:0], *of[at]]) for z, of in zip(whole, texts, strict=True)]
        more = {"kernel": "triton", "exchange": exchange, "precision": precision, "sync": None}
        got, of_rank = ragged_loss(wb.functional, mine, [of[at] for of in lengths], **more)
        sizes = [max(1e-6, float(of.norm())) for of in grads]
        errors = [float((a - b).norm()) / size for a, b, size in zip(of_rank, true, sizes, strict=True)]
        found[exchange, precision, longest] = max([*errors, abs(float(got - value)) / float(value)])
    made = [(made.call, made.kernels, made.in_kernels) for made in choice.choices()]
    return found, [of for of in made if of[0] == "max_sim_loss"]  # a process may have computed other losses before


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the interpreter")
@pytest.mark.parametrize("counts", [(5,), (4, 2), (3, 0, 4)], ids=str)
def test_a_loss_in_kernels_is_that_of_one_process(counts):
    """The check of first use has chosen kernels on all ranks, in each form."""
    for errors, made in run_ranks(on_ranks, len(counts), counts):
        assert all(error < 1e-5 for error in errors.values()), errors
        assert len(made) >= 4
        names = ("document_gradient", "query_gradient", "token_maxima", "token_sums")
        assert set(made) == {("max_sim_loss", tuple(f"{name}_by_pointers" for name in names), True)}


@needs_triton
@pytest.mark.parametrize("more", [{"dtype": torch.float64}, {"precision": "bfloat16x3"}], ids=str)
def test_what_kernels_do_not_support_is_plain_pytorch(more):
    lengths = (2, 5, 1, 4), (1, 40, 3, 17)
    dtype = more.pop("dtype", torch.float32)
    given = [tokens(of, seed=seed, dtype=dtype) / 4 for seed, of in enumerate(lengths)]
    found = [ragged_loss(wb.functional, given, lengths, kernel=kernel, **more) for kernel in ("torch", "triton")]
    for got, true in zip(*([value, *grads] for value, grads in found), strict=True):
        assert torch.equal(got, true)


@needs_triton
def test_a_kernel_keeps_winners_for_the_backward_pass(monkeypatch):
    """With memory for all winners the backward pass finds none again, in tiles or in one matrix."""
    lengths = (2, 5, 1, 4), (1, 40, 3, 17)
    given = [tokens(of, seed=seed, dtype=torch.float32) / 4 for seed, of in enumerate(lengths)]
    started, found = [], []
    run = wb.kernels.launch.run
    monkeypatch.setattr(
        wb.kernels.launch, "run", lambda kernel, *of, **more: (started.append(kernel), run(kernel, *of, **more))[1]
    )
    for memory in ("flat", 2**24, "auto"):
        ragged_loss(wb.functional, given, lengths, kernel="triton", memory=memory)  # which makes the check
        started.clear()
        result = ragged_loss(wb.functional, given, lengths, kernel="triton", memory=memory)
        found.append(([kernel.fn.__name__ for kernel in started].count("token_maxima"), result))
    assert [count for count, _ in found] == [2, 1, 1]
    flat, kept, matrix = ((value, *grads) for _, (value, grads) in found)
    assert all(map(torch.equal, flat, kept))
    torch.testing.assert_close(matrix, kept, rtol=1e-6, atol=1e-7)
