"""Losses with sentence-transformers' signatures, without it: embeddings in, the dense formula's value and gradient out.

`make ecosystem` runs them inside its trainer.
"""

import sys

import pytest
import torch
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.integrations import sentence_transformers as ours
from wholebatch.integrations._framework import FrameworkError
from wholebatch.testing import run_ranks

ROWS = (5, 2)
ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
CASES = {
    "pool": {},
    "all directions": {"directions": ALL},
    "in_batch_negatives": {"hardness_mode": "in_batch_negatives", "hardness_strength": 4.0},
    "hard_negatives": {"hardness_mode": "hard_negatives", "hardness_strength": 4.0},
}


def columns():
    """Return anchors, positives and two columns of negatives of all processes."""
    return torch.randn(4, sum(ROWS), 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def dense(embeddings, directions=("query_to_doc",), hardness_mode=None, hardness_strength=0.0):
    """Return the loss of one process, entry by entry."""
    q, k, *negatives = F.normalize(embeddings, dim=-1)
    documents, b = torch.cat([k, *negatives]), len(q)
    losses = []
    for i in range(b):
        own = torch.arange(len(documents)) % b == i
        to_documents = documents @ q[i]
        harder = (own & (torch.arange(len(documents)) >= b)) if hardness_mode == "hard_negatives" else ~own
        extra = hardness_strength * to_documents.detach() * harder if hardness_mode else 0.0
        logits = [20 * to_documents + extra]
        if "query_to_query" in directions:
            logits.append(20 * q[torch.arange(b) != i] @ q[i])
        if "doc_to_query" in directions:
            logits.append(20 * q @ k[i])
        if "doc_to_doc" in directions:
            logits.append(20 * documents[~own] @ k[i])
        losses.append(torch.cat(logits).logsumexp(0) - 20 * q[i] @ k[i])
    return torch.stack(losses).mean()


def on_a_rank(settings):
    rank = torch.distributed.get_rank()
    local = columns().split(ROWS, dim=1)[rank].clone().requires_grad_()
    loss = ours.MultipleNegativesRankingLoss(None, **settings).compute_loss_from_embeddings([*local], None)
    loss.backward()
    return loss.detach(), local.grad / len(ROWS)  # sync="mean": W times the local share


@pytest.mark.parametrize("name", CASES)
def test_embeddings_get_the_gradient_of_one_process(name):
    full = columns().requires_grad_()
    true = dense(full, **CASES[name])
    true.backward()
    found = run_ranks(on_a_rank, 2, CASES[name])
    for loss, _ in found:
        assert loss.item() == pytest.approx(true.item(), rel=1e-12)
    gradient = torch.cat([grad for _, grad in found], dim=1)
    assert (gradient - full.grad).norm() < 1e-10 * full.grad.norm()


def test_each_setting_is_another_loss():
    values = {dense(columns(), **settings).item() for settings in CASES.values()}
    assert len(values) == len(CASES)


def test_a_missing_framework_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(FrameworkError, match=r"tested with sentence_transformers 6\.2\.0: pip install 'sentence-tr"):
        ours.CachedMultipleNegativesRankingLoss(None)
    assert ours.MultipleNegativesRankingLoss(None, scale=wb.Scale(20.0)).temperature == pytest.approx(0.05)
