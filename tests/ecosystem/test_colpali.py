"""colpali-engine's losses: in these settings `max_sim_loss` has their value and their gradients.

    make late

One process, float64, against the reference implementation and the function for the whole batch. `logit_scale` is
1 / temperature.
"""

import pytest
import torch
from late_interaction import Batch, assert_other_loss, assert_same_loss, of_both, unit, value_and_gradients
from torch.nn.functional import cross_entropy

import wholebatch as wb
from wholebatch._base.third_party import declare_torchvision_operators

declare_torchvision_operators()
pytest.importorskip("colpali_engine")
from colpali_engine.loss import late_interaction_losses as losses  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn


def of_colpali(name, batch, **settings):
    """Return one of colpali-engine's losses of unit embeddings, zero in the padding, as its models return them."""
    loss = getattr(losses, name)(**settings)
    own = "Negative" in name

    def of(queries, documents):
        documents = (unit(documents) * batch.document_mask[..., None]).unflatten(0, (batch.b, batch.n))
        queries = unit(queries) * batch.query_mask[..., None]
        return loss(queries, documents[:, 0], *([documents[:, 1:]] if own else []))

    return of


def as_colpali(ours, batch, **settings):
    """Return `max_sim_loss` of the positives in colpali-engine's settings: zeros in the padding are tokens."""

    def loss(queries, documents):
        documents = unit(documents) * batch.document_mask[..., None]
        return ours(unit(queries), documents[:: batch.n], query_mask=batch.query_mask, **settings)

    return loss


def as_colpali_own(ours, batch, **settings):
    """Return `max_sim_loss` of each query with one of its own negatives at a time.

    Equal ids exclude the other queries' positives, and share_hard_negatives=False their negatives.
    """

    def loss(queries, documents):
        documents = (unit(documents) * batch.document_mask[..., None]).unflatten(0, (batch.b, batch.n))
        pairs = torch.stack([documents[:, :1].expand(-1, batch.n - 1, -1, -1), documents[:, 1:]], 2).flatten(0, 2)
        rows = batch.b * (batch.n - 1)
        return ours(
            unit(queries).repeat_interleave(batch.n - 1, 0),
            pairs,
            query_mask=batch.query_mask.repeat_interleave(batch.n - 1, 0),
            documents_per_query=2,
            share_hard_negatives=False,
            query_ids=torch.zeros(rows, dtype=torch.int64),
            document_ids=torch.tensor([0, 1]).repeat(rows),
            **settings,
        )

    return loss


MEAN = {"logit_scale": 50.0, "token_reduction": "mean"}  # of their defaults, temperature=0.02, normalize_scores=True
SUM = {"logit_scale": 2.0}


@of_both
@pytest.mark.parametrize("b", [1, 2, 5])
@pytest.mark.parametrize(("theirs", "settings"), [({}, MEAN), ({"temperature": 0.5, "normalize_scores": False}, SUM)])
def test_colbert_loss(ours, b, theirs, settings):
    batch = Batch(b)
    theirs = of_colpali("ColbertLoss", batch, **theirs)
    if b == 1:
        assert value_and_gradients(theirs, batch)[0] == 0  # a query alone has no negatives
    else:
        assert_same_loss(as_colpali(ours, batch, **settings), theirs, batch)


@of_both
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_colbert_negative_loss(ours, n, weight):
    """Its in-batch term is `max_sim_loss`; its other term compares a query with its own documents only."""
    batch = Batch(n=n)

    def both(queries, documents):
        return weight * as_colpali(ours, batch, **MEAN)(queries, documents) + (1 - weight) * as_colpali_own(
            ours, batch, **MEAN
        )(queries, documents)

    assert_same_loss(both, of_colpali("ColbertNegativeCELoss", batch, in_batch_term_weight=weight), batch)


@of_both
def test_colbert_negative_loss_is_no_softmax_of_all_documents(ours):
    batch = Batch()

    def shared(queries, documents):
        documents = unit(documents) * batch.document_mask[..., None]
        return ours(unit(queries), documents, query_mask=batch.query_mask, documents_per_query=3, **MEAN)

    for weight in (0.0, 0.5, 1.0):
        assert_other_loss(shared, of_colpali("ColbertNegativeCELoss", batch, in_batch_term_weight=weight), batch)


@of_both
def test_colbert_pairwise_loss(ours):
    """It takes the highest of the negatives alone: the same loss for two documents, another one for more."""
    for b, check in ((2, assert_same_loss), (5, assert_other_loss)):
        batch = Batch(b)
        theirs = of_colpali("ColbertPairwiseCELoss", batch, temperature=0.02)
        check(as_colpali(ours, batch, **MEAN), theirs, batch)


@of_both
@pytest.mark.parametrize(
    ("theirs", "settings"),
    [
        ({"normalize_scores": False}, MEAN),
        ({}, {"logit_scale": 50.0}),
        ({"pos_aware_negative_filtering": True, "filter_threshold": 0.1}, MEAN),  # halves scores of close negatives
        ({"use_smooth_max": True}, MEAN),  # a logarithm of a sum of exponentials instead of the maximum
    ],
)
def test_colbert_loss_in_other_settings(ours, theirs, settings):
    batch = Batch(5)
    assert_other_loss(as_colpali(ours, batch, **settings), of_colpali("ColbertLoss", batch, **theirs), batch)


@of_both
def test_colbert_loss_with_padding_masked_out(ours):
    batch = Batch(5)

    def masked(queries, documents):
        return ours(
            unit(queries),
            unit(documents)[:: batch.n],
            query_mask=batch.query_mask,
            document_mask=batch.document_mask[:: batch.n],
            **MEAN,
        )

    assert_other_loss(masked, of_colpali("ColbertLoss", batch), batch)


def test_their_transposed_direction_is_another_score():
    """compute_symetric_loss exchanges queries and documents: document tokens then look for query tokens."""
    batch = Batch(5)
    theirs = of_colpali("ColbertLoss", batch, normalize_scores=False, temperature=0.5)

    def both_of_trainer(queries, documents):
        q, d = unit(queries) * batch.query_mask[..., None], unit(documents) * batch.document_mask[..., None]
        scores = 2 * wb.reference.max_sim(d[:: batch.n], q)
        return (theirs(queries, documents) + cross_entropy(scores, torch.arange(5))) / 2

    ours = as_colpali(
        wb.reference.max_sim_loss, batch, logit_scale=2.0, directions=("query_to_document", "document_to_query")
    )
    assert_other_loss(ours, both_of_trainer, batch)
