"""Runs of sentence-transformers' own trainer with a tiny encoder and random words, in one process or on two.

The global batch of a step is the same on one process and on two: their sampler gives rank r the r-th of each pair of
batches. Weights and losses are float64.
"""

import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from dual import Run, as_launched, free_port, reductions_counted, weights

from wholebatch._base.third_party import version
from wholebatch.integrations._framework import _numbers
from wholebatch.testing import run_ranks

BEFORE_6_2 = _numbers(version("sentence-transformers") or "") < (6, 2)
# Of the distance moved: 20 steps in float64, summed in another order. Earlier cached losses of theirs round to float32.
ROUNDING = 1e-6 if BEFORE_6_2 else 1e-11
with_scale = pytest.mark.skipif(BEFORE_6_2, reason="earlier trainers do not clear the gradients of losses")

WORDS = [
    "sort",
    "find",
    "read",
    "write",
    "open",
    "close",
    "list",
    "file",
    "line",
    "word",
    "number",
    "sum",
    "the",
    "a",
    "of",
    "in",
    "to",
    "all",
]
COLUMNS = ("anchor", "positive", "negative_1", "negative_2")
ROWS, STEPS = 8, 20
NOT_THEIRS = ("CoSENTLoss", "AnglELoss", "BatchAllTripletLoss")  # losses that WholeBatchLoss takes


@dataclass
class Case:
    """A loss by its name and arguments, and the columns of its data."""

    loss: str
    columns: int = 2
    settings: dict = field(default_factory=dict)
    matryoshka: dict | None = None
    guide: bool | str = False
    labels: bool | int = False  # one for each row, or so many
    ours: dict = field(default_factory=dict)
    trainer: dict = field(default_factory=dict)


def encoder(folder, seed=0, size=16, reverse=False):
    """Return a sentence encoder without dropout."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    path = Path(folder) / f"bert-{seed}-{reverse}"
    if not path.exists():
        vocabulary = ["[PAD]", "[UNK]", *(reversed(WORDS) if reverse else WORDS)]
        inner = Tokenizer(models.WordLevel({word: k for k, word in enumerate(vocabulary)}, unk_token="[UNK]"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(vocabulary), hidden_size=size, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        BertModel(config).save_pretrained(path)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
        )
        tokenizer.save_pretrained(path)
    return SentenceTransformer(modules=[Transformer(str(path)), Pooling(size, "mean")], device="cpu").double()


def texts(rows, columns, seed=1, labels=False):
    """Return a data set of random words, each row another one."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)

    def text():
        length = int(torch.randint(2, 7, (), generator=generator))
        return " ".join(WORDS[k] for k in torch.randint(len(WORDS), (length,), generator=generator).tolist())

    found = {name: [text() for _ in range(rows)] for name in COLUMNS[:columns]}
    if labels:
        shape = (rows,) if labels is True else (rows, labels)
        found["label"] = torch.rand(shape, generator=generator, dtype=torch.float64).tolist()
    return Dataset.from_dict(found)


def loss_of(how, case, model, folder):
    """Return a case's loss: "ours" or "theirs".

    "ours, local" and "theirs, gathered" have the other `gather_across_devices`; "ours in their MatryoshkaLoss" has only
    the wrapper from them.
    """
    from sentence_transformers.sentence_transformer import losses as theirs

    from wholebatch.integrations import sentence_transformers as ours

    module = theirs if how.startswith("theirs") else ours
    gather = {"ours, local": {"gather_across_devices": False}, "theirs, gathered": {"gather_across_devices": True}}
    guide = [encoder(folder, seed=5, reverse=case.guide == "other words")] if case.guide else []
    if case.loss in NOT_THEIRS:
        loss = getattr(theirs, case.loss)(model, **case.settings)
        loss = loss if module is theirs else ours.WholeBatchLoss(model, loss, **case.ours)
    else:
        settings = case.settings | gather.get(how, {}) | (case.ours if module is ours else {})
        loss = getattr(module, case.loss)(model, *guide, **settings)
    if case.matryoshka is not None:
        wrapper = theirs if how == "ours in their MatryoshkaLoss" else module
        loss = wrapper.MatryoshkaLoss(model, loss, **case.matryoshka)
    return loss


def arguments(folder, ranks, **settings):
    from sentence_transformers import SentenceTransformerTrainingArguments

    defaults = {
        "per_device_train_batch_size": ROWS // ranks,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo" if ranks > 1 else None,
    }
    return SentenceTransformerTrainingArguments(folder, **(defaults | settings))


def trained(model, loss, data, ranks, reductions=(), **settings):
    """Train in this process, as a rank or alone."""
    from sentence_transformers import SentenceTransformerTrainer

    start, before = weights(model), len(reductions)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SentenceTransformerTrainer(model, arguments(folder, ranks, **settings), train_dataset=data, loss=loss)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(start, weights(model), losses, len(reductions) - before)


def run_cases(how, cases, folder, ranks, reductions=()):
    """Train all cases, each from the same start; the text of an error takes the place of a run."""
    found = {}
    for name, case in cases.items():
        model = encoder(folder)
        data = texts(
            ROWS * STEPS * case.trainer.get("gradient_accumulation_steps", 1), case.columns, labels=case.labels
        )
        try:
            found[name] = trained(model, loss_of(how, case, model, folder), data, ranks, reductions, **case.trainer)
        except Exception as error:  # a test asserts on it
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _rank(port, jobs, folder):
    as_launched(port)
    reductions = reductions_counted()
    return {how: run_cases(how, cases, folder, 2, reductions) for how, cases in jobs.items()}


def on_two(jobs, folder):
    """Train the cases of each kind of loss on two processes, and return both processes' runs."""
    return run_ranks(partial(_rank, free_port(), jobs, folder), 2, timeout_s=540)
