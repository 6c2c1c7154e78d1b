"""Features of sentence-transformers' trainers with our losses, and mistakes that the losses refuse.

    make ecosystem

Each body runs in one process with their loss, and on two processes with ours.
"""

import inspect
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dual import Run, as_launched, distance, free_port, weights
from sentence_runs import ROUNDING, ROWS, WORDS, arguments, encoder, texts, trained, with_scale

pytest.importorskip("sentence_transformers")
import sentence_transformers
from sentence_transformers.sentence_transformer import losses as theirs
from sentence_transformers.util import dot_score

import wholebatch as wb
from wholebatch.auditing import presets
from wholebatch.integrations import sentence_transformers as ours
from wholebatch.integrations._framework import SENTENCE_TRANSFORMERS
from wholebatch.integrations.sentence_transformers.embedding import cos_sim, pairwise_dot_score
from wholebatch.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn

SPLIT = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": ROWS}


def several_datasets(module, folder, ranks, *, scales=(20.0, 5.0), **settings):
    """Train on two data sets with different columns, each with its own loss."""
    from datasets import DatasetDict
    from sentence_transformers import SentenceTransformerTrainer

    model = encoder(folder)
    loss = {
        "pairs": module.MultipleNegativesRankingLoss(model, scale=scales[0]),
        "triplets": module.MultipleNegativesRankingLoss(model, scale=scales[1]),
    }
    data = DatasetDict({"pairs": texts(80, 2), "triplets": texts(80, 3, seed=3)})
    start = weights(model)
    with tempfile.TemporaryDirectory() as out:
        trainer = SentenceTransformerTrainer(
            model, arguments(out, ranks, max_steps=10, **settings), train_dataset=data, loss=loss
        )
        trainer.train()
    return Run(start, weights(model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def splade(module, folder, ranks):
    """Train a sparse encoder with their SpladeLoss around the loss; its regularizers are no means over rows either."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments, losses
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    model = SparseEncoder(modules=[MLMTransformer(f"{folder}/mlm"), SpladePooling("max")], device="cpu").double()
    loss, regularizers = losses.SparseMultipleNegativesRankingLoss(model), {}
    if module is ours:
        loss = ours.MultipleNegativesRankingLoss(model, scale=1.0, similarity_fct=dot_score)
        regularizers = {
            f"{column}_regularizer": ours.WholeBatchLoss(model, losses.FlopsLoss(model))
            for column in ("document", "query")
        }
    loss = losses.SpladeLoss(model, loss, 3e-3, 5e-3, **regularizers)
    start = weights(model)
    with tempfile.TemporaryDirectory() as out:
        settings = arguments(out, ranks).to_dict()
        names = inspect.signature(SparseEncoderTrainingArguments).parameters
        changed = {name: settings[name] for name in CHANGED if name in names}
        trainer = SparseEncoderTrainer(
            model, SparseEncoderTrainingArguments(out, **changed), train_dataset=texts(160, 3), loss=loss
        )
        trainer.train()
        card = model.model_card_data.to_dict()
    return Run(start, weights(model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]), card


CHANGED = (
    "per_device_train_batch_size",
    "max_steps",
    "optim",
    "learning_rate",
    "lr_scheduler_type",
    "max_grad_norm",
    "logging_steps",
    "save_strategy",
    "report_to",
    "disable_tqdm",
    "use_cpu",
    "ddp_backend",
)


def evaluated_and_saved(module, folder, ranks):
    """Evaluate, train with checkpoints, evaluate again, and load the last checkpoint."""
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer

    model = encoder(folder)
    loss = module.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
    with tempfile.TemporaryDirectory() as out:
        settings = {
            "per_device_eval_batch_size": ROWS // ranks,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_on_start": True,
        }
        trainer = SentenceTransformerTrainer(
            model,
            arguments(out, ranks, max_steps=4, save_strategy="steps", save_steps=4, **settings),
            train_dataset=texts(32, 3),
            eval_dataset=texts(3 * ROWS, 3, seed=9),
            loss=loss,
        )
        trainer.train()
        values = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        checkpoint = Path(out) / "checkpoint-4"
        if not trainer.is_world_process_zero():
            return values, None, ""
        card = (checkpoint / "README.md").read_text()
        saved = SentenceTransformer(str(checkpoint), device="cpu")
        found = torch.from_numpy(saved.encode("sort the list")).double()
        alike = torch.allclose(found, torch.from_numpy(model.encode("sort the list")).double(), rtol=0, atol=1e-6)
    return values, alike, card


def evaluated_first(module, folder, ranks):
    """Evaluate before training: their trainer then never wraps the model for its engine."""
    from sentence_transformers import SentenceTransformerTrainer

    model = encoder(folder)
    loss = module.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
    with tempfile.TemporaryDirectory() as out:
        trainer = SentenceTransformerTrainer(
            model, arguments(out, ranks, max_steps=4), train_dataset=texts(32, 2), eval_dataset=texts(16, 2), loss=loss
        )
        trainer.evaluate()
        trainer.train()
    return weights(model)


def prompts(module, folder, ranks):
    """Train with a prompt that pooling leaves out."""
    model = encoder(folder)
    model[1].include_prompt = False
    loss = module.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
    return trained(model, loss, texts(160, 2), ranks, prompts={"anchor": "find the "}), model[1].include_prompt


def bfloat16(module, folder, ranks):
    """Train in float32 under autocast."""
    model = encoder(folder).float()
    loss = module.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
    return trained(model, loss, texts(160, 2), ranks, bf16=True)


def learned_scale(folder, ranks, *, gather=True):
    model, scale = encoder(folder), wb.Scale(20.0)
    loss = ours.CachedMultipleNegativesRankingLoss(model, scale, mini_batch_size=3, gather_across_devices=gather)
    return trained(model, loss, texts(160, 2), ranks), scale().item()


def learned_scale_in_matryoshka(folder, ranks):
    model, scale = encoder(folder), wb.Scale(20.0)
    loss = ours.CachedMultipleNegativesRankingLoss(model, scale, mini_batch_size=3)
    run = trained(model, ours.MatryoshkaLoss(model, loss, [4, 16]), texts(160, 3), ranks)
    return run, scale().item()


def resumed(folder, ranks, *, name, losses):
    """Train 8 steps; then 4, and 4 more in a fresh trainer. Return the weights and the scales of the losses of each."""
    from sentence_transformers import SentenceTransformerTrainer

    found = []
    for part, steps, checkpoint in (("straight", 8, None), ("halves", 4, None), ("halves", 8, "checkpoint-4")):
        out, model = Path(folder) / f"{name}-{ranks}-{part}", encoder(folder)
        loss, scales = losses(model)
        settings = {"max_steps": steps, "learning_rate": 0.2, "save_strategy": "steps", "save_steps": 4}
        args = arguments(str(out), ranks, **settings)
        trainer = SentenceTransformerTrainer(model, args, train_dataset=texts(8 * ROWS, 2), loss=loss)
        trainer.train(resume_from_checkpoint=checkpoint and str(out / checkpoint))
        found.append((weights(model), [scale().item() for scale in scales]))
    return found


def one_scale(model):
    scale = wb.Scale(20.0).double()
    loss = ours.CachedMultipleNegativesRankingLoss(model, scale, mini_batch_size=3)
    return ours.MatryoshkaLoss(model, loss, [4, 16]), [scale]


class ScaledLoss(torch.nn.Module):
    """A loss in the form of theirs, with a parameter."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scale = model, wb.Scale(20.0).double()

    def compute_loss_from_embeddings(self, embeddings, labels):
        return wb.reference.clip_loss(*[torch.nn.functional.normalize(x, dim=1) for x in embeddings], self.scale())


def scale_of_theirs(model):
    loss = ScaledLoss(model)
    return ours.WholeBatchLoss(model, loss), [loss.scale]


SCALES = {"one": one_scale, "theirs": scale_of_theirs}


def sizes_drawn(folder, ranks):
    model = encoder(folder)
    loss = ours.MatryoshkaLoss(model, ours.MultipleNegativesRankingLoss(model), [4, 8, 16], n_dims_per_step=2)
    return trained(model, loss, texts(160, 3), ranks)


def columns_differ():
    """Rank 0 has one negative for each anchor, rank 1 none."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    embeddings = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(3 - rank)]
    found = {}
    for name, settings in {
        "pool": {},
        "apart": {"hardness_mode": "hard_negatives", "hardness_strength": 3.0, "directions": ("query_to_doc",)},
    }.items():
        loss = ours.MultipleNegativesRankingLoss(torch.nn.Identity(), **settings)
        found[name] = loss.compute_loss_from_embeddings(embeddings).item()
    return found, embeddings


def body(port, folder):
    as_launched(port)

    def tried(run, *args, **settings):
        try:
            return run(*args, **settings)
        except Exception as error:  # a test asserts on it
            return f"{type(error).__name__}: {error}"

    return {
        "several": several_datasets(ours, folder, 2, **SPLIT),
        "several, apart": tried(several_datasets, ours, folder, 2),
        "splade": splade(ours, folder, 2),
        "saved": evaluated_and_saved(ours, folder, 2),
        "evaluated first": tried(evaluated_first, ours, folder, 2),
        "evaluated first, theirs": evaluated_first(theirs, folder, 2),
        "prompts": prompts(ours, folder, 2),
        "bfloat16": bfloat16(ours, folder, 2),
        "drawn": sizes_drawn(folder, 2),
        "columns": columns_differ(),
        "scale": tried(learned_scale, folder, 2),
        "scale, local": tried(learned_scale, folder, 2, gather=False),
        "scale, matryoshka": tried(learned_scale_in_matryoshka, folder, 2),
        **{f"resumed, {name}": tried(resumed, folder, 2, name=name, losses=of) for name, of in SCALES.items()},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    found = str(tmp_path_factory.mktemp("models"))
    model = encoder(found)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS) + 2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(f"{found}/mlm")
    AutoTokenizer.from_pretrained(model[0].auto_model.config._name_or_path).save_pretrained(f"{found}/mlm")
    return found


@pytest.fixture(scope="module")
def found(folder):
    return run_ranks(partial(body, free_port(), folder), 2, timeout_s=400)


def assert_trained_alike(runs, true, tolerance=ROUNDING):
    for run in runs:
        assert distance(run, true) < tolerance
        assert run.losses == pytest.approx(true.losses, rel=max(tolerance, 1e-6))
        assert torch.equal(run.weights, runs[0].weights)


def test_several_datasets_with_a_loss_each(found, folder):
    true = several_datasets(theirs, folder, 1)
    assert_trained_alike([of_rank["several"] for of_rank in found], true)


def test_processes_with_batches_of_different_datasets_raise(found):
    """By default their trainer gives each process a batch of another data set."""
    for of_rank in found:
        assert "ValueError: info_nce_loss: logit_scale must be the same on all ranks" in of_rank["several, apart"]


def test_splade(found, folder):
    true, _ = splade(theirs, folder, 1)
    assert_trained_alike([of_rank["splade"][0] for of_rank in found], true)


def test_evaluation_checkpoints_and_model_cards(found, folder):
    values, alike, card = evaluated_and_saved(theirs, folder, 1)
    assert alike
    assert len(values) == 3
    cards = [of_rank["saved"][2] for of_rank in found if of_rank["saved"][2]]
    assert len(cards) == 1
    for of_rank in found:
        assert of_rank["saved"][0] == pytest.approx(values, rel=1e-6)
        assert of_rank["saved"][1] is not False
    for text in ("loss:CachedMultipleNegativesRankingLoss", '"mini_batch_size": 3', '"scale": 20.0', "2101.06983"):
        assert text in card
        assert text in cards[0]
    assert '"gather_across_devices": true' in cards[0]
    assert "wholebatch.integrations.sentence_transformers.CachedMultipleNegativesRankingLoss" in cards[0]


def test_evaluation_before_training_leaves_the_model_without_an_engine(found):
    """A trap of their trainer: processes then train apart. Our cached losses notice it."""
    first, second = (of_rank["evaluated first, theirs"] for of_rank in found)
    assert not torch.allclose(first, second)
    assert "parameters must be the same on all ranks" in found[0]["evaluated first"]


def test_a_prompt_that_pooling_leaves_out(found, folder):
    true, left_out = prompts(theirs, folder, 1)
    assert left_out is False
    assert_trained_alike([of_rank["prompts"][0] for of_rank in found], true)


def test_bfloat16(found, folder):
    """Rows meet other rows in another chunk, and bfloat16 has 8 bits."""
    assert_trained_alike([of_rank["bfloat16"] for of_rank in found], bfloat16(theirs, folder, 1), tolerance=0.05)


@with_scale
@pytest.mark.parametrize(
    ("name", "run"), [("scale", learned_scale), ("scale, matryoshka", learned_scale_in_matryoshka)]
)
def test_a_learned_scale_is_trained_by_the_trainer(found, folder, name, run):
    true, scale = run(folder, 1)
    assert abs(scale - 20) > 0.5
    assert_trained_alike([of_rank[name][0] for of_rank in found], true)
    assert [of_rank[name][1] for of_rank in found] == pytest.approx([scale] * 2, rel=1e-6)


@with_scale
@pytest.mark.parametrize("name", SCALES)
def test_a_learned_scale_continues_after_a_checkpoint(found, folder, name):
    runs = [resumed(folder, 1, name=name, losses=SCALES[name]), *(of_rank[f"resumed, {name}"] for of_rank in found)]
    straight, straight_scales = runs[0][0]
    for _, (_, halfway_scales), (end, end_scales) in runs:
        assert (end - straight).norm() < 1e-7 * straight.norm()  # their checkpoint of the model is in float32
        assert end_scales == pytest.approx(straight_scales, rel=1e-7)
        assert abs(halfway_scales[0] - 20) > 0.05  # a scale that restarted would show


@with_scale
def test_a_checkpoint_without_the_parameters_of_the_loss_is_refused(folder):
    resumed(folder, 1, name="lost", losses=one_scale)
    checkpoint, model = Path(folder) / "lost-1-halves" / "checkpoint-4", encoder(folder)
    (checkpoint / "loss.safetensors").unlink()
    args, (loss, _) = arguments(str(checkpoint.parent), 1), one_scale(model)
    trainer = sentence_transformers.SentenceTransformerTrainer(model, args, train_dataset=texts(80, 2), loss=loss)
    with pytest.raises(ValueError, match=r"must have the parameters of the loss, loss\.loss\.scale.* got none: they"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


@with_scale
def test_a_learned_scale_without_gathering_is_refused(found):
    assert "scale must be a number with gather_across_devices=False" in found[0]["scale, local"]


def test_all_processes_draw_the_same_sizes(found, folder):
    assert_trained_alike([of_rank["drawn"] for of_rank in found], sizes_drawn(folder, 1))


@pytest.mark.parametrize("name", ["pool", "apart"])
def test_processes_may_have_different_numbers_of_negatives(found, name):
    (values, first), (_, second) = (of_rank["columns"] for of_rank in found)
    queries, keys = (torch.nn.functional.normalize(torch.cat([first[k], second[k]]), dim=1) for k in (0, 1))
    logits = queries @ torch.cat([keys, torch.nn.functional.normalize(first[2], dim=1)]).T
    penalty = torch.zeros_like(logits)
    if name == "apart":
        penalty[:4, 8:] = 3 * torch.diag(logits[:4, 8:].diagonal())
    true = torch.nn.functional.cross_entropy(20 * logits + penalty, torch.arange(8))
    assert values[name] == pytest.approx(true.item(), rel=1e-12)


# Signatures, versions, imports.


@pytest.mark.parametrize("name", [name for name in ours.__all__ if hasattr(theirs, name)])
def test_signatures_are_theirs(name):
    """Their arguments come first, in their order; one default differs, and later ones are ours, by keyword only."""
    of_theirs, of_ours = (inspect.signature(getattr(module, name).__init__).parameters for module in (theirs, ours))
    for mine, other in zip(list(of_ours.values())[: len(of_theirs)], of_theirs.values(), strict=True):
        assert (mine.name, mine.kind) == (other.name, other.kind)
        of_pairs = name in ("DistillKLDivLoss", "MarginMSELoss")
        similarity = pairwise_dot_score if of_pairs else cos_sim
        expected = {"gather_across_devices": True, "similarity_fct": similarity}.get(mine.name, other.default)
        assert mine.default == expected
    assert all(x.kind == x.KEYWORD_ONLY for x in list(of_ours.values())[len(of_theirs) :])


@pytest.mark.parametrize("name", [name for name in ours.__all__ if hasattr(theirs, name) and name != "MatryoshkaLoss"])
def test_the_configuration_for_the_card_has_their_keys(folder, name):
    model = encoder(folder)
    guide = [model] if "GIST" in name else []
    mine, other = (getattr(module, name)(model, *guide).get_config_dict() for module in (ours, theirs))
    assert mine.keys() == other.keys()
    assert {**mine, **{k: False for k in mine if k == "gather_across_devices"}} == other
    assert getattr(ours, name)(model, *guide).citation.startswith("\n@")


def test_the_temperature_is_one_over_the_scale(folder):
    model = encoder(folder)
    for name in ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"):
        assert getattr(ours, name)(model, scale=10).temperature == getattr(theirs, name)(model, scale=10).temperature


def test_the_installed_version_is_among_the_tested():
    assert sentence_transformers.__version__ in SENTENCE_TRANSFORMERS.versions


def test_the_import_needs_only_torch():
    code = (
        "import sys, wholebatch.integrations.sentence_transformers as m\n"
        "m.MultipleNegativesRankingLoss(None)\n"
        "assert not {'sentence_transformers', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


# The audit.


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("MultipleNegativesRankingLoss, default", False),
        ("MultipleNegativesRankingLoss of wholebatch.integrations", True),
        ("CachedMultipleNegativesRankingLoss of wholebatch.integrations", True),
    ],
)
def test_the_audit_finds_the_gradients_exact(name, exact):
    report = wb.audit(presets.settings("sentence_transformers")[name], ranks=(1, 2))
    assert report.exact is exact, report


def test_a_guide_in_half_precision(folder):
    model, guide = encoder(folder), encoder(folder, seed=5).half()
    features = [model.preprocess(column) for column in texts(ROWS, 3).to_dict().values()]
    loss = ours.GISTEmbedLoss(model, guide, temperature=0.1)
    values = [loss(features, None).item()]
    loss.guide = guide.double()  # the same numbers, without rounding in between
    values.append(loss(features, None).item())
    assert values[0] == pytest.approx(values[1], rel=1e-9)


# Mistakes.


def ranking(model, **settings):
    return ours.MultipleNegativesRankingLoss(model, **settings)


def cached(model, **settings):
    return ours.CachedMultipleNegativesRankingLoss(model, **settings)


def gist(model, **settings):
    return ours.GISTEmbedLoss(model, **{"guide": model} | settings)


def parts(model, dims, *more, loss=None):
    return ours.MatryoshkaLoss(model, loss or ours.MultipleNegativesRankingLoss(model), dims, *more)


MISTAKES = [
    (partial(ranking, scale=0), "scale must be positive, got 0; to train it pass wb.Scale"),
    (partial(ranking, scale=float("nan")), "scale must be finite, got nan"),
    (partial(ranking, scale=torch.nn.Linear(1, 1)), "scale must be a number, or a wb.Scale to train it, got Linear"),
    (
        partial(ranking, similarity_fct=sentence_transformers.util.euclidean_sim),
        "must be cos_sim or dot_score .* 'eucl",
    ),
    (partial(ranking, similarity_fct=torch.nn.CosineSimilarity()), "must be cos_sim or dot_score of"),
    (partial(ranking, similarity_fct=None), "must be cos_sim or dot_score of sentence_transformers.util, got None"),
    (partial(ranking, directions=("doc_to_query",)), "must have 'query_to_doc' among them"),
    (
        partial(ranking, directions=("query_to_doc", "sideways")),
        "directions must be one of 'query_to_doc'.* 'sideways'",
    ),
    (partial(ranking, partition_mode="both"), "partition_mode must be one of 'joint', 'per_direction'; got 'both'"),
    (
        partial(ranking, directions=("query_to_doc", "doc_to_doc"), partition_mode="per_direction"),
        "partition_mode='per_direction' does not go with doc_to_doc",
    ),
    (partial(ranking, hardness_mode="all"), "hardness_mode must be one of 'in_batch_negatives'.* got 'all'"),
    (partial(ranking, hardness_strength=-1.0), "hardness_strength must not be negative, got -1.0; 0 turns it off"),
    (partial(ranking, gather_across_devices="yes"), "gather_across_devices must be True or False, got 'yes'"),
    (
        partial(ranking, gather_across_devices=False, group=wb.comm.LocalCommunicator()),
        "gather_across_devices=False compares the rows of one process, so it does not go with group=",
    ),
    (partial(cached, mini_batch_size=0), "mini_batch_size must be a positive integer, .*; got 0"),
    (partial(cached, mini_batch_num_tokens=-3), "mini_batch_num_tokens must be a positive integer, .*; got -3"),
    (partial(cached, show_progress_bar=True), "show_progress_bar must be False, got True"),
    (partial(gist, temperature=0.0), "temperature must be positive, got 0.0"),
    (partial(gist, margin_strategy="percent"), "margin_strategy must be one of 'absolute', 'relative'; got 'percent'"),
    (partial(gist, margin=float("inf")), "margin must be finite, got inf"),
    (partial(gist, guide=torch.nn.Identity()), "guide must have a tokenizer of transformers, got NoneType"),
    (partial(parts, dims=[]), r"matryoshka_dims must be positive, and each of them once, got \[\]"),
    (partial(parts, dims=[4, 4]), r"each of them once, got \[4, 4\]"),
    (partial(parts, dims=[4, 32]), "matryoshka_dims must not exceed the model's embedding size 16"),
    (lambda model: parts(model, [4, 8], [1.0]), "matryoshka_weights must be 2 numbers"),
    (lambda model: parts(model, [4, 8], None, 0), "n_dims_per_step must be -1 for all sizes, or at least 1, got 0"),
    (
        lambda model: parts(model, [4], loss=theirs.CoSENTLoss(model)),
        "loss must be one of wholebatch.integrations.sentence_transformers, got sentence_transformers.*CoSENTLoss",
    ),
    (
        lambda model: ours.WholeBatchLoss(model, theirs.CoSENTLoss),
        r"loss must be an instance of a loss, got the class CoSENTLoss; pass CoSENTLoss\(model\)",
    ),
    (partial(ranking, scale=torch.tensor(20.0)), r"scale must be a number, or a wb\.Scale to train it, got a tensor"),
    (lambda model: ours.WholeBatchLoss(model, ranking(model)), "got wholebatch's MultipleNegativesRankingLoss"),
    (
        lambda model: ours.WholeBatchLoss(model, theirs.CachedMultipleNegativesRankingLoss(model)),
        "loss must not cache gradients, got CachedMultipleNegativesRankingLoss; pass MultipleNegatives",
    ),
    (
        lambda model: ours.WholeBatchLoss(
            model, theirs.MultipleNegativesRankingLoss(model, gather_across_devices=True)
        ),
        "loss must not gather, got MultipleNegativesRankingLoss with gather_across_devices=True",
    ),
    (
        lambda model: ours.WholeBatchLoss(model, theirs.CoSENTLoss(model), mini_batch_size=0),
        "mini_batch_size must be a positive integer, .*; got 0",
    ),
    (
        lambda model: ours.WholeBatchLoss(
            model, theirs.DenoisingAutoEncoderLoss.__new__(theirs.DenoisingAutoEncoderLoss)
        ),
        "loss must have compute_loss_from_embeddings",
    ),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_mistakes_are_refused(folder, make, message):
    with pytest.raises(ValueError, match=message):
        make(encoder(folder))


def test_one_column_is_refused(folder):
    model = encoder(folder)
    with pytest.raises(ValueError, match="at least two columns of inputs, anchors and positives, got 1"):
        ranking(model)([model.preprocess(["sort the list"])], None)


def test_one_column_and_labels_for_their_triplet_losses(folder):
    model, labels = encoder(folder), torch.tensor([0, 0, 1, 1, 0])
    rows = model.preprocess(["sort the list", "a fast list", "the old tree", "tree of words", "sort it"])
    loss = theirs.BatchAllTripletLoss(model, margin=0.5)
    expected = loss([dict(rows)], labels)
    assert expected > 0
    assert torch.allclose(ours.WholeBatchLoss(model, loss)([dict(rows)], labels), expected, rtol=1e-6)


def test_static_embeddings_are_refused_by_cached_losses_alone(folder):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = encoder(folder).tokenizer
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")
    with pytest.raises(
        ValueError, match=r"got one whose first module is a StaticEmbedding.*use MultipleNegativesRanking"
    ):
        cached(model)
    columns = [model.preprocess(["sort the list", "open a file"]), model.preprocess(["the list sort", "file open"])]
    found = ranking(model)(columns, None)
    assert found.item() == pytest.approx(theirs.MultipleNegativesRankingLoss(model)(columns, None).item(), abs=1e-6)


@with_scale
def test_their_matryoshka_loss_of_a_cached_loss_refuses_a_learned_scale(folder):
    model = encoder(folder)
    loss = theirs.MatryoshkaLoss(model, cached(model, scale=wb.Scale(20.0)), [4, 16])
    columns = [model.preprocess(["sort the list", "open a file"]), model.preprocess(["the list sort", "file open"])]
    with pytest.raises(
        ValueError, match=r"scale must be a number there; for a wb\.Scale use MatryoshkaLoss of wholebatch"
    ):
        loss(columns, None)


def test_their_matryoshka_loss_evaluates_a_cached_loss(folder):
    model = encoder(folder)
    columns = [model.preprocess(["sort the list", "open a file"]), model.preprocess(["the list sort", "file open"])]
    values = []
    for module in (theirs, ours):
        loss = theirs.MatryoshkaLoss(model, module.CachedMultipleNegativesRankingLoss(model), [4, 16])
        with torch.no_grad():
            values.append(loss(columns, None).item())
    assert values[1] == pytest.approx(values[0], rel=1e-12)
