"""sentence-transformers' trainer of multi-vector models on two processes: with our losses, 20 steps end as on one.

    make ecosystem

One process trains with their loss on the whole batch, in float64, which is the truth. The distance between two runs is
relative to the distance that training has moved the weights.
"""

import inspect

import pytest
import torch
from dual import distance
from multi_vector_runs import Case, on_two, run_cases, token_encoder
from sentence_runs import ROUNDING, with_scale

pytest.importorskip("sentence_transformers.multi_vector_encoder")
from sentence_transformers.multi_vector_encoder import losses as theirs
from sentence_transformers.multi_vector_encoder import scoring

import wholebatch as wb
from wholebatch.auditing import presets
from wholebatch.integrations import sentence_transformers as ours

pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn

PLAIN, CACHED = "MultiVectorMultipleNegativesRankingLoss", "CachedMultiVectorMultipleNegativesRankingLoss"
CASES = {
    "pairs": Case(PLAIN),
    "two negatives": Case(PLAIN, 4, {"scale": 2.0, "mini_batch_size": 3}),
    "mean of tokens": Case(PLAIN, 3, {"scale": 8.0}, mean=True),
    "cached": Case(CACHED, 3, {"mini_batch_size": 3}),
    "cached, tokens": Case(CACHED, 3, {"mini_batch_num_tokens": 12}),
    "accumulation": Case(PLAIN, 2, trainer={"gradient_accumulation_steps": 2, "learning_rate": 0.2}),
}
SOME = {name: CASES[name] for name in ("pairs", "two negatives", "cached")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = str(tmp_path_factory.mktemp("models"))
    token_encoder(found)  # written once, before processes read it
    return found


@pytest.fixture(scope="module")
def true(folder):
    """The truth: their loss in one process."""
    return run_cases("theirs", CASES, folder, 1)


@pytest.fixture(scope="module")
def found(folder):
    """All runs on two processes, by the kind of loss."""
    return on_two({"ours": CASES, "ours, local": SOME, "theirs": SOME, "theirs, gathered": SOME}, folder)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_end_with_the_weights_of_one(found, true, name):
    for run in (of_rank["ours"][name] for of_rank in found):
        assert not isinstance(run, str), run
        assert (true[name].weights - true[name].start).norm() > 0.05 * true[name].start.norm(), "nothing was trained"
        print(f"{name}: {distance(run, true[name]):.1e}")
        assert distance(run, true[name]) < ROUNDING
        assert run.losses == pytest.approx(true[name].losses, rel=1e-6)  # the trainer adds losses up in float32
        assert torch.equal(run.weights, found[0]["ours"][name].weights)
        assert run.reductions == 20


@pytest.mark.parametrize("name", SOME)
def test_their_loss_is_exact_if_it_gathers_and_ends_elsewhere_if_not(found, true, name):
    for how in ("theirs", "theirs, gathered"):
        print(f"{how}, {name}: {distance(found[0][how][name], true[name]):.2g}")
    assert distance(found[0]["theirs"][name], true[name]) > 0.1
    assert distance(found[0]["theirs, gathered"][name], true[name]) < ROUNDING


@pytest.mark.parametrize("name", SOME)
def test_without_gathering_the_loss_is_theirs(found, name):
    assert distance(found[0]["ours, local"][name], found[0]["theirs"][name]) < ROUNDING


@pytest.mark.parametrize("name", [PLAIN, CACHED])
def test_the_signatures_are_theirs(name):
    own = {"group", "exchange", "memory", "precision"}
    of_theirs, of_ours = (inspect.signature(getattr(module, name)).parameters for module in (theirs, ours))
    assert set(of_ours) - own == set(of_theirs)
    changed = {n for n in of_theirs if of_ours[n].default != of_theirs[n].default}
    assert changed == {"gather_across_devices"}


@pytest.mark.parametrize(
    ("setting", "exact"),
    [
        (f"{PLAIN}, default", False),
        (f"{PLAIN}, gather_across_devices=True", True),
        (f"{PLAIN} of wholebatch.integrations", True),
        (f"{CACHED} of wholebatch.integrations", True),
    ],
)
def test_the_audit(setting, exact):
    report = wb.audit(presets.settings("sentence_transformers")[setting], ranks=(1, 2))
    assert report.exact == exact, report


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 0}, "scale must be positive, got 0"),
        (
            {"similarity_fct": scoring.xtr_scores},
            "must be mean_colbert_scores or colbert_scores of .*scoring, got 'xtr",
        ),
        ({"mini_batch_size": 0}, "mini_batch_size must be a positive integer, .*; got 0"),
        ({"score_mini_batch_size": 1.5}, "score_mini_batch_size must be a positive integer, .*; got 1.5"),
        ({"gather_across_devices": "yes"}, "gather_across_devices must be True or False, got 'yes'"),
    ],
)
def test_mistakes_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ours.MultiVectorMultipleNegativesRankingLoss(None, **settings)


def test_a_document_without_tokens_is_refused(folder):
    """Theirs gives it a score of -10000, and warns."""
    model = token_encoder(folder)
    columns = [model.preprocess(["find a file", "sort"]), model.preprocess(["the the", "sort it all"])]
    with pytest.raises(ValueError, match="documents must have a token in each item, got 0 in item 0"):
        ours.MultiVectorMultipleNegativesRankingLoss(model)(columns)


@with_scale
def test_a_trained_scale_and_the_card(folder):
    model = token_encoder(folder)
    loss = ours.CachedMultiVectorMultipleNegativesRankingLoss(model, scale=wb.Scale(2.0))
    columns = [model.preprocess(["find a file", "sort"]), model.preprocess(["a list of files", "sort it all"])]
    loss(columns).backward()
    assert [x.grad.abs().item() > 0 for x in loss.scale.parameters()] == [True]
    assert loss.get_config_dict() == {
        "scale": pytest.approx(2.0),
        "similarity_fct": "colbert_scores",
        "mini_batch_size": 32,
        "mini_batch_num_tokens": None,
        "score_mini_batch_size": None,
        "gather_across_devices": True,
    }
    assert "Scaling Deep" in loss.citation
    assert "Efficient Natural Language" in ours.MultiVectorMultipleNegativesRankingLoss(model).citation  # as theirs
