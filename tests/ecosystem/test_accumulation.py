"""Accumulation in the trainers of sentence-transformers and of PyLate: a step has the mean over its micro-steps.

    make ecosystem; make late, on transformers 5.3.0, whose Trainer and accelerate both divide by their number

The truth is a loop without a trainer, on the same micro-batches, with their loss of one process.
"""

import copy

import pytest
import torch
from dual import weights

from wholebatch._base.third_party import declare_torchvision_operators
from wholebatch.integrations._framework import SENTENCE_TRANSFORMERS, TRANSFORMERS

pytest.importorskip("sentence_transformers")
declare_torchvision_operators()
pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn

ROUNDING, LEARNING_RATE = 1e-10, 0.5
WORDS = ("sort", "find", "read", "write", "open", "close", "list", "file", "line", "word", "sum", "the")


def bert(folder):
    """Write a tiny BERT without dropout, and return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]", "[unused0]", "[unused1]"]
    inner = Tokenizer(models.WordLevel({word: k for k, word in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(special) + len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(
        tokenizer_object=inner, cls_token="[CLS]", sep_token="[SEP]", model_max_length=32, **names
    ).save_pretrained(folder)
    return str(folder)


def sentence_encoder(folder):
    """Return the parts of a run with sentence-transformers: model, their losses, ours, the trainer's settings."""
    if SENTENCE_TRANSFORMERS.is_older("6.0"):
        pytest.skip("the losses need sentence-transformers 6.0")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    from wholebatch.integrations import sentence_transformers as ours

    model = SentenceTransformer(modules=[Transformer(folder), Pooling(16, "mean")], device="cpu")
    return model, losses.MultipleNegativesRankingLoss, (ours, "MultipleNegativesRankingLoss"), {}


def late_interaction(folder):
    """Return the parts of a run with PyLate, as `sentence_encoder` does."""
    pytest.importorskip("pylate")
    if not SENTENCE_TRANSFORMERS.is_older("6.0"):
        pytest.skip("PyLate needs sentence-transformers 5")
    from pylate import losses, models, utils

    from wholebatch.integrations import pylate as ours

    model = models.ColBERT(folder, embedding_size=8, device="cpu", do_query_expansion=False)
    return model, losses.Contrastive, (ours, "Contrastive"), {"data_collator": utils.ColBERTCollator(model.tokenize)}


def texts(rows):
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(len(WORDS), (2, rows, 4), generator=generator).tolist()
    columns = [[" ".join(WORDS[k] for k in text) for text in column] for column in chosen]
    return Dataset.from_dict({"anchor": columns[0], "positive": columns[1]})


def trained(model, loss, micro_steps, folder, **settings):
    """Train three steps by the trainer; return the weights, and the inputs of each micro-step."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    inputs, forward = [], loss.forward

    def recorded(features, labels=None):
        inputs.append(copy.deepcopy(list(features)))
        return forward(features, labels)

    loss.forward = recorded
    args = SentenceTransformerTrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=micro_steps, max_steps=3, optim="sgd",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data = texts(4 * 3 * micro_steps)
    SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, **settings).train()
    return weights(model), inputs


def by_hand(model, loss, micro_steps, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for number, features in enumerate(inputs):
        (loss(features, None) / micro_steps).backward()
        if (number + 1) % micro_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("parts", [sentence_encoder, late_interaction])
@pytest.mark.parametrize("form", ["", "Cached"])
def test_a_step_has_the_mean_over_its_micro_steps(parts, form, tmp_path):
    model, theirs, (ours, name), settings = parts(bert(tmp_path / "bert"))
    model.double()
    start, found, micro_steps = copy.deepcopy(model), {}, 4
    sizes = {"mini_batch_size": 3} if form else {}
    for kind in ("ours", "theirs"):
        trains = copy.deepcopy(start)
        loss = getattr(ours, f"{form}{name}")(trains, **sizes) if kind == "ours" else theirs(trains)
        found[kind], inputs = trained(trains, loss, micro_steps, str(tmp_path), **settings)
        true = by_hand(again := copy.deepcopy(start).train(), theirs(again), micro_steps, inputs)
        found[kind] = ((found[kind] - true).norm() / (true - weights(start)).norm()).item()
    assert found["ours"] < ROUNDING
    assert (found["theirs"] > 0.1) is TRANSFORMERS.is_older("5.10"), "their Trainer and accelerate both divide"
