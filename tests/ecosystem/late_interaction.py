"""For tests with other libraries' losses of late interaction: a batch of tokens, models that return it, a comparison.

Queries and documents have different numbers of tokens. The padding holds large numbers, which no loss may see.
"""

import importlib

import pytest
import torch
from compare import assert_same
from torch import nn
from torch.nn.functional import normalize

import wholebatch as wb

EXACT = 1e-10
WIDTH, QUERY_TOKENS, DOCUMENT_TOKENS = 8, 5, 7
OURS = {
    module.__name__.rpartition(".")[2]: module.max_sim_loss
    for module in (wb.reference, wb.functional)
    if hasattr(module, "max_sim_loss")
}
of_both = pytest.mark.parametrize("ours", OURS.values(), ids=OURS)


class Batch:
    """b queries with n documents each, the positive first, as raw embeddings and masks."""

    def __init__(self, b=4, n=3, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def tokens(count, longest):
            lengths = torch.randint(2, longest + 1, (count,), generator=generator)
            lengths[0] = longest
            mask = torch.arange(longest) < lengths[:, None]
            x = torch.randn(count, longest, WIDTH, generator=generator, dtype=torch.float64)
            return torch.where(mask[..., None], x, 100 * x), mask

        self.b, self.n = b, n
        self.queries, self.query_mask = tokens(b, QUERY_TOKENS)
        self.documents, self.document_mask = tokens(b * n, DOCUMENT_TOKENS)

    def columns(self, queries, documents):
        """Return the columns of a data set, (anchor, positive, negative_1, ...), as (embeddings, mask)."""
        return [
            (queries, self.query_mask),
            *((documents[k :: self.n], self.document_mask[k :: self.n]) for k in range(self.n)),
        ]


def value_and_gradients(loss, batch):
    """Return a loss of raw embeddings, and its gradients by those of all tokens."""
    leaves = [x.clone().requires_grad_() for x in (batch.queries, batch.documents)]
    value = loss(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


def assert_same_loss(ours, theirs, batch, tolerance=EXACT):
    for name, actual, expected in zip(
        ("value", "queries", "documents"),
        value_and_gradients(ours, batch),
        value_and_gradients(theirs, batch),
        strict=True,
    ):
        assert expected.abs().max() > 1e-3, f"{name} is too small to compare"
        assert_same(actual, expected, relative=tolerance, what=name)


def assert_other_loss(ours, theirs, batch):
    with pytest.raises(AssertionError, match="largest error"):
        assert_same_loss(ours, theirs, batch, tolerance=1e-3)


def unit(x):
    return normalize(x, dim=-1)


class Tokens(nn.Module):
    """A model of sentence-transformers or PyLate that returns the embeddings that it gets."""

    skiplist = ()

    def __init__(self, do_query_expansion=False):
        super().__init__()
        self.do_query_expansion = do_query_expansion

    def forward(self, features, task=None):
        return features


def features(batch, queries, documents, embed=unit):
    return [
        {"token_embeddings": embed(x), "attention_mask": mask.long(), "input_ids": torch.ones_like(mask, dtype=int)}
        for x, mask in batch.columns(queries, documents)
    ]


def made(module, name, *args, **settings):

    return getattr(importlib.import_module(module), name)(Tokens(*args), **settings)


def from_leaves(calculate):
    def of(make, batch):
        def loss(queries, documents):
            columns = [(unit(x), mask) for x, mask in batch.columns(queries, documents)]
            reps = [[part.detach().requires_grad_() for part in x.split(3)] for x, _ in columns]
            masks = [[*mask.split(3)] for _, mask in columns]
            value = calculate(make(), reps, masks)
            grads = [torch.cat([part.grad for part in parts]) for parts in reps]
            by = sum((x * grad).sum() for (x, _), grad in zip(columns, grads, strict=True))
            return value.detach() + by - by.detach()

        return loss

    return of


def as_sentence_transformers(ours, batch, **settings):
    """Return `max_sim_loss` in sentence-transformers' settings."""

    def loss(queries, documents):
        return ours(
            unit(queries),
            unit(documents),
            query_mask=batch.query_mask,
            document_mask=batch.document_mask,
            documents_per_query=batch.n,
            **settings,
        )

    return loss
