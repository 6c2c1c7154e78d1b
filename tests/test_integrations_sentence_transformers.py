"""Losses with sentence-transformers' signatures, without it: embeddings in, the dense formula's value and gradient out.

`make ecosystem` runs them inside its trainer.
"""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.integrations import sentence_transformers as ours
from wholebatch.integrations._framework import FrameworkError
from wholebatch.testing import RankError, run_ranks

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


def test_a_model_card_names_a_loss_by_the_module_that_users_import():
    assert {getattr(ours, name).__module__ for name in ours.__all__} == {ours.__name__}


def test_a_missing_framework_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(FrameworkError, match=r"tested with sentence_transformers 6\.0\.0, .* and 6\.2\.0: pip ins"):
        ours.CachedMultipleNegativesRankingLoss(None)
    assert ours.MultipleNegativesRankingLoss(None, scale=wb.Scale(20.0)).temperature == pytest.approx(0.05)


def test_a_framework_that_is_too_old_is_refused_by_constructors(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(__version__="5.3.0"))
    for loss in (ours.MultipleNegativesRankingLoss, ours.MarginMSELoss):
        with pytest.raises(FrameworkError, match=r"sentence_transformers 5\.3\.0 is too old; this adapter was tested"):
            loss(None)


def test_a_trained_scale_needs_a_trainer_that_clears_its_gradient(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(__version__="6.1.0"))
    ours.MultipleNegativesRankingLoss(None, scale=20.0)
    with pytest.raises(FrameworkError, match=r"before 6\.2 never clears the gradient .* pass a number as scale"):
        ours.MultipleNegativesRankingLoss(None, scale=wb.Scale(20.0))


def test_cached_losses_have_the_arguments_of_their_loss_and_of_chunks_in_their_order():
    chunks = ["mini_batch_size", "mini_batch_num_tokens"]
    assert [*inspect.signature(ours.CachedMultipleNegativesSymmetricRankingLoss).parameters] == [
        *("model", "scale", "similarity_fct", *chunks, "gather_across_devices", "show_progress_bar"),
        *("group", "exchange", "memory", "precision"),
    ]
    message = r"CachedGISTEmbedLoss.__init__\(\) got an unexpected keyword argument 'rows'; it takes model, guide, temp"
    with pytest.raises(TypeError, match=message):
        ours.CachedGISTEmbedLoss(None, None, rows=3)
    with pytest.raises(TypeError, match="missing a required argument: 'guide'"):
        ours.CachedGISTEmbedLoss(None)


# A teacher's scores.

TEACHERS = (ours.DistillKLDivLoss, ours.MarginMSELoss)


def distilled(embeddings, labels):
    """Return the divergence, and the error of margins, of one process."""
    q, *documents = embeddings
    student = torch.stack([(q * d).sum(1) for d in documents], 1)
    divergence = F.kl_div(student.log_softmax(1), labels.softmax(1), reduction="batchmean")
    margins, of_teacher = student[:, :1] - student[:, 1:], labels[:, :1] - labels[:, 1:]
    return torch.stack([divergence, F.mse_loss(margins, of_teacher)])


def teacher_scores():
    return 50 + torch.randn(sum(ROWS), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def distilled_on_a_rank():
    rank = torch.distributed.get_rank()
    local = columns().split(ROWS, dim=1)[rank].clone().requires_grad_()
    labels = teacher_scores().split(ROWS)[rank]
    losses = [of(None).compute_loss_from_embeddings([*local], labels) for of in TEACHERS]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).detach(), local.grad / len(ROWS)


def test_a_teachers_scores_over_uneven_processes():
    """Exact, where the mean of the processes' own losses is not."""
    embeddings = columns().requires_grad_()
    expected = distilled(embeddings, teacher_scores())
    expected.sum().backward()
    found = run_ranks(distilled_on_a_rank, len(ROWS))
    for losses, _ in found:
        assert torch.allclose(losses, expected.detach(), rtol=1e-12)
    assert torch.allclose(torch.cat([grad for _, grad in found], 1), embeddings.grad, rtol=1e-10, atol=1e-13)
    alone = [distilled(x, y) for x, y in zip(columns().split(ROWS, 1), teacher_scores().split(ROWS), strict=True)]
    assert (torch.stack(alone).mean(0) - expected).abs().min() > 1e-3


def test_a_teachers_scores_are_not_rounded_to_half_precision():
    embeddings, labels = columns().bfloat16(), teacher_scores()
    expected = distilled(embeddings.double(), labels)
    for of, value in zip(TEACHERS, expected, strict=True):
        loss = of(None).compute_loss_from_embeddings([*embeddings], labels)
        assert loss.item() == pytest.approx(value.item(), rel=1e-3)


def uneven_columns():
    local = list(columns().split(ROWS, dim=1)[torch.distributed.get_rank()])
    labels = teacher_scores().split(ROWS)[torch.distributed.get_rank()]
    if torch.distributed.get_rank():
        local[2] = local[2][:1]
    ours.DistillKLDivLoss(None).compute_loss_from_embeddings(local, labels)


def test_columns_that_differ_on_one_process_raise_on_all():
    with pytest.raises(RankError, match="embeddings must be 3 or more columns of one shape"):
        run_ranks(uneven_columns, 2)


@pytest.mark.parametrize("labels", [torch.ones(7), torch.ones(7, 3, dtype=torch.complex64), None])
def test_wrong_labels(labels):
    with pytest.raises(ValueError, match="labels must be a teacher's numbers of shape"):
        ours.DistillKLDivLoss(None).compute_loss_from_embeddings([*columns()], labels)
