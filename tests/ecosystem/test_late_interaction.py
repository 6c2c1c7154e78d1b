"""sentence-transformers' losses of multi-vector models: in these settings `max_sim_loss` has their value and gradients.

    make ecosystem

One process, float64, against the reference implementation and the function for the whole batch.
"""

from functools import partial

import pytest
import torch
from late_interaction import (
    Batch,
    Tokens,
    as_sentence_transformers,
    assert_other_loss,
    assert_same_loss,
    features,
    from_leaves,
    made,
    of_both,
)

pytest.importorskip("sentence_transformers.multi_vector_encoder")

pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn


def of_multi_vector(name, batch, *, scorer=None, **settings):
    """Return one of sentence-transformers' losses as a function of raw embeddings."""
    from sentence_transformers.multi_vector_encoder import losses, scoring

    if scorer is not None:
        settings["similarity_fct"] = getattr(scoring, scorer)
    loss = getattr(losses, name)(Tokens(), **settings)
    return lambda queries, documents: loss(features(batch, queries, documents), None)


def of_cached_multi_vector(batch, **settings):
    """Return their cached loss, which itself goes backward to leaves."""
    return from_leaves(lambda loss, reps, masks: loss.calculate_loss(reps, masks, with_backward=True))(
        lambda: made("sentence_transformers.multi_vector_encoder.losses", _CACHED, **settings), batch
    )


_PLAIN, _CACHED = "MultiVectorMultipleNegativesRankingLoss", "CachedMultiVectorMultipleNegativesRankingLoss"


@pytest.fixture
def _scores_in_float64(monkeypatch):
    """Leave scores in float64: sentence-transformers' scorers round each token's maximum to float32."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)


@of_both
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    ("theirs", "settings"),
    [
        ({}, {"logit_scale": 1.0}),
        ({"scale": 3.0, "mini_batch_size": 2, "score_mini_batch_size": 3}, {"logit_scale": 3.0}),
        ({"scale": 8.0, "scorer": "mean_colbert_scores"}, {"logit_scale": 8.0, "token_reduction": "mean"}),
    ],
)
@pytest.mark.usefixtures("_scores_in_float64")
def test_sentence_transformers_ranking(ours, n, theirs, settings):
    batch = Batch(n=n)
    assert_same_loss(as_sentence_transformers(ours, batch, **settings), of_multi_vector(_PLAIN, batch, **theirs), batch)
    cached = {name: of for name, of in theirs.items() if name == "scale"}
    if "scorer" not in theirs:
        assert_same_loss(
            as_sentence_transformers(ours, batch, **settings), of_cached_multi_vector(batch, **cached), batch
        )


@of_both
def test_sentence_transformers_scores_are_float32(ours):
    batch = Batch()
    found, expected = as_sentence_transformers(ours, batch, logit_scale=1.0), of_multi_vector(_PLAIN, batch)
    assert_same_loss(found, expected, batch, tolerance=1e-6)
    with pytest.raises(AssertionError):
        assert_same_loss(found, expected, batch)


@of_both
@pytest.mark.parametrize(
    ("theirs", "settings"),
    [
        ({"scale": 3.0}, {"logit_scale": 1 / 3.0}),
        ({"scorer": "mean_colbert_scores"}, {"logit_scale": 1.0}),
        ({}, {"logit_scale": 1.0, "share_hard_negatives": False}),
        ({}, {"logit_scale": 1.0, "directions": ("query_to_document", "document_to_query")}),
        ({"scorer": "xtr_scores"}, {"logit_scale": 1.0}),  # another score: tokens are retrieved first
    ],
)
def test_sentence_transformers_in_other_settings(ours, theirs, settings):
    batch = Batch()
    if theirs.get("scorer") == "xtr_scores":
        from sentence_transformers.multi_vector_encoder import scoring

        theirs = {"similarity_fct": partial(scoring.xtr_scores, top_k=8)}
    assert_other_loss(
        as_sentence_transformers(ours, batch, **settings), of_multi_vector(_PLAIN, batch, **theirs), batch
    )
