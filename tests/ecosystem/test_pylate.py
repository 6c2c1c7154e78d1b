"""PyLate's losses: in these settings `max_sim_loss` has their value and their gradients.

    make late

One process, float64, against the reference implementation and the function for the whole batch.
"""

import inspect

import pytest
import torch
from compare import assert_same
from late_interaction import (
    EXACT,
    Batch,
    Tokens,
    assert_other_loss,
    assert_same_loss,
    features,
    from_leaves,
    made,
    of_both,
    unit,
    value_and_gradients,
)
from torch import nn

import wholebatch as wb
from wholebatch._base.third_party import declare_torchvision_operators
from wholebatch.auditing import presets
from wholebatch.integrations import pylate as adapter

declare_torchvision_operators()
pytest.importorskip("pylate")
from pylate import losses  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn


def of_pylate(batch, *, do_query_expansion=True, **settings):
    """Return PyLate's contrastive loss as a function of raw embeddings, which it normalizes."""
    loss = losses.Contrastive(Tokens(do_query_expansion), **settings)
    return lambda queries, documents: loss(features(batch, queries, documents, embed=lambda x: x))


def of_cached_pylate(batch, *, do_query_expansion=True, **settings):
    def calculate(loss, reps, masks):
        return loss.calculate_loss(reps, [torch.cat(of) for of in masks], with_backward=True)

    return from_leaves(calculate)(
        lambda: made("pylate.losses", "CachedContrastive", do_query_expansion, **settings), batch
    )


def as_pylate(ours, batch, *, do_query_expansion=True, zeros=True, **settings):
    """Return `max_sim_loss` in PyLate's settings.

    PyLate multiplies scores by the documents' masks before the maximum, so padding and skipped tokens count as tokens
    with score 0: zero vectors without a mask. With `zeros=False` they are left out, as masks do elsewhere; that is the
    same if each query token has a document token with a positive score. With query expansion all query tokens count.
    """

    def loss(queries, documents):
        mask, documents = batch.document_mask, unit(documents)
        return ours(
            unit(queries),
            documents * mask[..., None] if zeros else documents,
            query_mask=None if do_query_expansion else batch.query_mask,
            document_mask=None if zeros else mask,
            documents_per_query=batch.n,
            **settings,
        )

    return loss


@of_both
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("do_query_expansion", [True, False])
@pytest.mark.parametrize(
    ("theirs", "settings"),
    [
        ({}, {"logit_scale": 1.0}),
        ({"temperature": 0.25, "score_mini_batch_size": 3}, {"logit_scale": 4.0}),
        ({"size_average": False}, {"logit_scale": 1.0, "reduction": "sum"}),
    ],
)
def test_pylate_contrastive(ours, n, do_query_expansion, theirs, settings):
    batch = Batch(n=n)
    same = {"do_query_expansion": do_query_expansion}
    assert_same_loss(as_pylate(ours, batch, **same, **settings), of_pylate(batch, **same, **theirs), batch)


@of_both
@pytest.mark.parametrize("do_query_expansion", [True, False])
def test_pylate_cached_contrastive(ours, do_query_expansion):
    """With `size_average=True` its gradients are those of the sum: the mean is taken after the backward pass."""
    batch, same = Batch(), {"do_query_expansion": do_query_expansion}
    total = as_pylate(ours, batch, **same, logit_scale=4.0, reduction="sum")
    assert_same_loss(total, of_cached_pylate(batch, **same, temperature=0.25, size_average=False), batch)
    mean = as_pylate(ours, batch, **same, logit_scale=4.0)
    cached = of_cached_pylate(batch, **same, temperature=0.25)
    (value, *gradients), (expected, *right) = value_and_gradients(cached, batch), value_and_gradients(mean, batch)
    assert_same(value, expected, relative=EXACT)
    for found, of_mean in zip(gradients, right, strict=True):
        assert_same(found, batch.b * of_mean, relative=EXACT)  # b times that of the value that it returns
    assert_other_loss(mean, cached, batch)


@of_both
def test_pylate_with_documents_masked_out(ours):
    """Masks that leave tokens out give PyLate's loss where all maxima are positive, and another one elsewhere."""
    batch = Batch()
    assert_other_loss(as_pylate(ours, batch, zeros=False, logit_scale=1.0), of_pylate(batch), batch)
    for x in (batch.queries, batch.documents):
        x.abs_()  # all cosines are positive
    assert_same_loss(as_pylate(ours, batch, zeros=False, logit_scale=1.0), of_pylate(batch), batch)


@of_both
@pytest.mark.parametrize(
    ("theirs", "settings"),
    [
        ({"temperature": 0.25}, {"logit_scale": 0.25}),
        ({"do_query_expansion": False}, {"logit_scale": 1.0}),
        ({}, {"logit_scale": 1.0, "share_hard_negatives": False}),
        ({"size_average": False}, {"logit_scale": 1.0}),
    ],
)
def test_pylate_in_other_settings(ours, theirs, settings):
    batch = Batch()
    assert_other_loss(as_pylate(ours, batch, **settings), of_pylate(batch, **theirs), batch)


def test_pylate_distillation_has_these_scores():
    """Their Distillation compares a query with its own documents alone, by the same scores."""
    batch, labels = Batch(), torch.rand(4, 3, dtype=torch.float64)

    def theirs(queries, documents):
        loss = losses.Distillation(Tokens(True))
        both = [(queries, batch.query_mask), (documents, batch.document_mask)]
        return loss(
            [
                {"token_embeddings": x, "attention_mask": mask, "input_ids": torch.ones_like(mask, dtype=int)}
                for x, mask in both
            ],
            labels,
        )

    def ours(queries, documents):
        scores = wb.reference.max_sim(unit(queries), unit(documents) * batch.document_mask[..., None])
        own = scores.unflatten(1, (batch.b, batch.n)).diagonal(dim1=0, dim2=1).T
        low, high = own.amin(1, keepdim=True), own.amax(1, keepdim=True)
        student = ((own - low) / (high - low + 1e-8)).log_softmax(1)
        return nn.functional.kl_div(student, labels.log_softmax(1), reduction="batchmean", log_target=True)

    assert_same_loss(ours, theirs, batch)


# The adapter: PyLate's names, over the whole batch.


def as_adapter(name, batch, *, do_query_expansion=True, **settings):
    loss = getattr(adapter, name)(Tokens(do_query_expansion), **settings)
    return lambda queries, documents: loss(features(batch, queries, documents, embed=lambda x: x))


@pytest.mark.parametrize("do_query_expansion", [True, False])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.25}, {"size_average": False, "score_mini_batch_size": 2}])
def test_the_adapter_is_pylates_loss_in_one_process(do_query_expansion, settings):
    batch, same = Batch(), {"do_query_expansion": do_query_expansion}
    theirs = of_pylate(batch, **same, **settings)
    assert_same_loss(as_adapter("Contrastive", batch, **same, **settings), theirs, batch)


def test_the_cached_adapter_gives_the_gradient_of_its_value():
    model = nn.Linear(6, 5, dtype=torch.float64)

    class Encoder(Tokens):
        def __init__(self):
            super().__init__(True)
            self.inner = model

        def forward(self, columns):
            return {"token_embeddings": self.inner(columns["x"])}

    columns = [
        {"x": torch.randn(5, t, 6, dtype=torch.float64), "attention_mask": mask, "input_ids": torch.ones_like(mask)}
        for t in (3, 4, 6)
        for mask in [(torch.arange(t) < torch.randint(1, t + 1, (5, 1))).long()]
    ]
    found = []
    for loss in (losses.Contrastive(Encoder()), adapter.CachedContrastive(Encoder(), mini_batch_size=2)):
        model.zero_grad()
        columns_padded = [{name: _padded(of) for name, of in column.items()} for column in columns[1:]]
        value = loss([columns[0], *columns_padded])
        value.backward()
        found.append((value.detach(), model.weight.grad.clone()))
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_same(actual, expected, relative=EXACT)


def _padded(x):
    """Return documents in six tokens: their loss stacks columns, and their collator pads all to one length."""
    return nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, 6 - x.shape[1]))


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_the_signatures_are_theirs(name):
    of_theirs, of_ours = (inspect.signature(getattr(module, name)).parameters for module in (losses, adapter))
    assert [*of_ours][: len(of_theirs)] == [*of_theirs]
    changed = {n for n in of_theirs if of_ours[n].default != of_theirs[n].default}
    assert changed == {"gather_across_devices"}


@pytest.mark.parametrize(
    ("setting", "exact"),
    [
        ("Contrastive, gather_across_devices=True", False),
        ("Contrastive of wholebatch.integrations", True),
        ("CachedContrastive of wholebatch.integrations", True),
    ],
)
def test_the_audit(setting, exact):
    report = wb.audit(presets.settings("pylate")[setting], ranks=(1, 2))
    assert report.exact == exact, report


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_metric": len}, "score_metric must be None or PyLate's ColBERTScores"),
        ({"temperature": 0}, "temperature must be positive, got 0"),
        ({"mini_batch_size": 0}, "mini_batch_size must be a positive integer, .*; got 0"),
        ({"show_progress_bar": True}, "show_progress_bar must be False, got True"),
        ({"gather_across_devices": 1}, "gather_across_devices must be True or False, got 1"),
    ],
)
def test_mistakes_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        adapter.CachedContrastive(Tokens(), **settings)
