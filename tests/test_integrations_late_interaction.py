"""Late interaction with other libraries' signatures, without these: token embeddings in, gradients out.

`make ecosystem` and `make late` run them inside their libraries' trainers.
"""

import sys

import pytest
import torch

import wholebatch as wb
from wholebatch.integrations import pylate
from wholebatch.integrations import sentence_transformers as ours
from wholebatch.integrations._framework import FrameworkError
from wholebatch.testing import run_ranks

ROWS, LONGEST = (4, 2), (3, 7, 5)  # anchors, positives, negatives


def columns():
    """Return the token embeddings of all processes' rows, and where there is a token, for each column."""
    made = torch.Generator().manual_seed(0)
    embeddings = [torch.randn(sum(ROWS), longest, 6, generator=made, dtype=torch.float64) for longest in LONGEST]
    masks = [
        torch.arange(longest) < torch.randint(1, longest + 1, (sum(ROWS), 1), generator=made) for longest in LONGEST
    ]
    return embeddings, masks


def sentence_transformers_loss(embeddings, masks):
    """Return their loss in one process: padding takes no part."""
    q, *documents = embeddings
    s = torch.cat(
        [
            torch.einsum("itd,jud->ijtu", q, x).masked_fill(~mask[None, :, None], float("-inf")).amax(3)
            for x, mask in zip(documents, masks[1:], strict=True)
        ],
        1,
    )
    s = (s * masks[0][:, None]).sum(2)
    return torch.nn.functional.cross_entropy(2.0 * s, torch.arange(len(s)))


def pylate_loss(embeddings, masks):
    """Return PyLate's loss in one process with query expansion: padding of documents has the score 0."""
    q, *documents = embeddings
    s = torch.cat(
        [
            (torch.einsum("itd,jud->ijtu", q, x) * mask[None, :, None]).amax(3).sum(2)
            for x, mask in zip(documents, masks[1:], strict=True)
        ],
        1,
    )
    return torch.nn.functional.cross_entropy(s / 0.5, torch.arange(len(s)), reduction="sum")


LOSSES = {
    "sentence-transformers": (
        sentence_transformers_loss,
        lambda *of: ours.MultiVectorMultipleNegativesRankingLoss(None, scale=2.0).compute_loss_from_tokens(*of),
    ),
    "PyLate": (
        pylate_loss,
        lambda *of: pylate.Contrastive(None, temperature=0.5, size_average=False).compute_loss_from_tokens(
            *of, every_query_token=True
        ),
    ),
}


def on_a_rank():
    rank, found = torch.distributed.get_rank(), {}
    embeddings, masks = ([x.split(ROWS)[rank] for x in of] for of in columns())
    for name, (_, loss_of) in LOSSES.items():
        leaves = [x.clone().requires_grad_() for x in embeddings]
        loss = loss_of(leaves, masks)
        loss.backward()
        found[name] = loss.detach(), [x.grad / len(ROWS) for x in leaves]  # sync="mean": W times the local share
    return found


def test_tokens_get_the_gradient_of_one_process():
    found = run_ranks(on_a_rank, 2)
    values = []
    for name, (dense, _) in LOSSES.items():
        embeddings, masks = columns()
        leaves = [x.requires_grad_() for x in embeddings]
        true = dense(leaves, masks)
        true.backward()
        values.append(true.item())
        for of_rank in found:
            assert of_rank[name][0].item() == pytest.approx(true.item(), rel=1e-12)
        for at, leaf in enumerate(leaves):
            gradient = torch.cat([of_rank[name][1][at] for of_rank in found])
            assert (gradient - leaf.grad).norm() < 1e-10 * leaf.grad.norm(), name
    assert values[0] != values[1]


MISTAKES = [
    (ours.MultiVectorMultipleNegativesRankingLoss, {"scale": 0}, "scale must be positive, got 0; to train it"),
    (ours.MultiVectorMultipleNegativesRankingLoss, {"scale": True}, "scale must be a number, or a wb.Scale to train"),
    (
        ours.MultiVectorMultipleNegativesRankingLoss,
        {"mini_batch_size": 0},
        "mini_batch_size must be a positive integer, r",
    ),
    (ours.CachedMultiVectorMultipleNegativesRankingLoss, {"show_progress_bar": True}, "show_progress_bar must be Fal"),
    (
        ours.CachedMultiVectorMultipleNegativesRankingLoss,
        {"gather_across_devices": False, "group": wb.comm.LocalCommunicator()},
        "gather_across_devices=False compares the rows of one process",
    ),
    (pylate.Contrastive, {"score_metric": len}, "score_metric must be None or PyLate's ColBERTScores, got <built-in"),
    (pylate.Contrastive, {"temperature": float("inf")}, "temperature must be finite, got inf"),
    (pylate.Contrastive, {"gather_across_devices": None}, "gather_across_devices must be True or False, got None"),
    (pylate.CachedContrastive, {"mini_batch_size": None}, "mini_batch_size must be a positive integer, .*; got None"),
    (pylate.CachedContrastive, {"show_progress_bar": True}, "show_progress_bar must be False, got True"),
]


@pytest.mark.parametrize(("loss", "settings", "message"), MISTAKES, ids=[message for *_, message in MISTAKES])
def test_mistakes_are_refused(loss, settings, message):
    with pytest.raises(ValueError, match=message):
        loss(None, **settings)


def test_a_missing_framework_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    monkeypatch.setitem(sys.modules, "pylate", None)
    with pytest.raises(FrameworkError, match=r"tested with sentence_transformers 6\.0\.0, .*: pip install"):
        ours.MultiVectorMultipleNegativesRankingLoss(None, similarity_fct=len)
    with pytest.raises(FrameworkError, match=r"tested with pylate 1\.6\.0: pip install"):
        pylate.Contrastive(None)([])
