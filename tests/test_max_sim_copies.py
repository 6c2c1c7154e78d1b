"""Copies of a token in a document: the first one has the gradient, however products are rounded."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import normalize, pad

import wholebatch as wb
from wholebatch.partition import Partition, Ragged
from wholebatch.sweep import Products, copies, max_sim
from wholebatch.sweep.copies import first_copies
from wholebatch.sweep.items import Items
from wholebatch.testing import run_ranks


def items_of(lengths):
    return Items(Ragged(Partition((len(lengths),)), tuple(lengths)), torch.tensor([0, *lengths]).cumsum(0))


def first_by_comparison(x, owners):
    equal = (x[:, None] == x[None]).all(2) & (owners[:, None] == owners[None])
    return equal.double().argmax(1)


def with_copies(lengths, d, seed, dtype):
    """Return random tokens of documents, each of which stands in its document about three times."""
    made = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        some = normalize(torch.randn(max(1, length // 3), d, generator=made, dtype=dtype), dim=1)
        found.append(some[torch.randint(0, len(some), (length,), generator=made)])
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 7, 64])
@pytest.mark.parametrize("vectors", [10, 2**11])  # the second document alone, or all together
def test_the_first_copy_of_each_vector_is_found(d, dtype, vectors, monkeypatch):
    monkeypatch.setattr(copies, "_NUMBERS", 5 * d)  # several steps
    monkeypatch.setattr(copies, "_VECTORS", vectors)
    lengths = [1, 30, 2, 17]
    items, x = items_of(lengths), with_copies(lengths, d, 0, dtype)
    owners = items.owners
    x[40:] = x[3]  # also equal to those of other documents
    expected = first_by_comparison(x, owners)
    assert (expected != torch.arange(len(x))).sum() > 20
    assert torch.equal(first_copies(x, items), expected)
    monkeypatch.setattr(copies, "_may_wait", lambda x: False)  # as on a GPU
    assert torch.equal(first_copies(x, items), expected)
    assert torch.equal(first_copies(x[:1], items_of([1])), torch.tensor([0]))


def test_no_copies_is_none():
    x = torch.arange(40.0).view(20, 2)
    assert first_copies(x, items_of([20])) is None
    assert first_copies(x.repeat(2, 1), items_of([20, 20])) is None  # each in another document
    assert first_copies(x[:1], items_of([1])) is None
    assert first_copies(x[:0], items_of([])) is None


def test_vectors_with_the_same_hash_are_compared(monkeypatch):
    monkeypatch.setattr(copies, "_hashes", lambda x, owners: torch.zeros(len(x), dtype=torch.int64))
    x = torch.tensor([[1.0], [2.0], [1.0], [2.0], [1.0]])
    assert first_copies(x, items_of([4, 1])).tolist() == [0, 1, 0, 3, 4]


def texts(counts, d, dtype):
    """Return the lengths and the tokens of queries, and those of documents with copies."""
    made = torch.Generator().manual_seed(d)
    lengths = [torch.randint(1, most, (sum(counts),), generator=made) for most in (9, 40)]
    queries = normalize(torch.randn(int(lengths[0].sum()), d, generator=made, dtype=dtype), dim=1)
    return lengths, (queries, with_copies(lengths[1].tolist(), d, d, dtype))


def gradient_of_documents(counts, d, dtype, **settings):
    """Return the gradient of this rank's documents, without the factor of an engine."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    at = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    lengths, vectors = texts(counts, d, dtype)
    q, documents = (
        torch.cat([x[:0], *x.split(of.tolist())[at]]).requires_grad_() for x, of in zip(vectors, lengths, strict=True)
    )
    offsets = [pad(of[at].cumsum(0), (1, 0)) for of in lengths]
    wb.functional.max_sim_loss(
        q, documents, logit_scale=1.0, query_offsets=offsets[0], document_offsets=offsets[1], sync=None, **settings
    ).backward()
    return documents.grad


def of_later_copies(grad, counts, d, dtype):
    """Return the gradient of all tokens that equal an earlier token of their document."""
    lengths, (_, documents) = texts(counts, d, dtype)
    owners = torch.arange(len(lengths[1])).repeat_interleave(lengths[1])
    return grad[first_by_comparison(documents, owners) != torch.arange(len(documents))]


@pytest.mark.parametrize("memory", ["flat", 2**20, 3000])
def test_the_first_copy_has_the_gradient_however_products_are_rounded(memory, monkeypatch):
    """Products whose last bits depend on their place, as at the edges of a matrix."""
    multiply, case = Products.multiply, ((11,), 16, torch.float64)

    def rounded(self, a, b, out, *, add=False):
        multiply(self, a, b, out, add=add)
        return out.mul_(1 + 1e-14 * torch.arange(out.numel(), dtype=out.dtype).view_as(out).remainder_(7))

    true = gradient_of_documents(*case, memory=memory)
    assert not of_later_copies(true, *case).any()
    monkeypatch.setattr(Products, "multiply", rounded)
    found = gradient_of_documents(*case, memory=memory)
    assert not of_later_copies(found, *case).any()
    torch.testing.assert_close(found, true, rtol=0, atol=1e-10)

    monkeypatch.setattr(max_sim, "first_copies", lambda *_: None)  # the tokens that have won
    assert of_later_copies(gradient_of_documents(*case, memory=memory), *case).any()


CASES = [(7, torch.float64, {}), (16, torch.float64, {"memory": 3000}), (64, torch.float32, {"exchange": "ring"})]


def gradients_of_rank(counts):
    return [gradient_of_documents(counts, d, dtype, **settings) for d, dtype, settings in CASES]


def test_the_first_copy_has_the_gradient_on_any_number_of_ranks():
    on_one = gradients_of_rank((11,))
    for counts in ((5, 6), (4, 0, 7)):
        found = run_ranks(gradients_of_rank, len(counts), counts)
        for at, (d, dtype, _) in enumerate(CASES):
            grad = torch.cat([of[at] for of in found])
            assert not of_later_copies(grad, counts, d, dtype).any()
            torch.testing.assert_close(grad, on_one[at], rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)
