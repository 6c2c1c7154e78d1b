"""Runs of FlagEmbedding's own program with a tiny BERT and random words, in one process or on two.

Weights are float64, without dropout. The global batch of a step is the same on one process and on two: the trainer's
sampler gives rank r the r-th of each pair of batches.
"""

import json
import os
import random
import runpy
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from dual import as_launched, free_port
from sentence_runs import WORDS

from wholebatch.integrations._framework import TRANSFORMERS
from wholebatch.testing import run_ranks

ROWS, STEPS = 8, 20
PROGRAMS = {
    "base": "FlagEmbedding.finetune.embedder.encoder_only.base",
    "m3": "FlagEmbedding.finetune.embedder.encoder_only.m3",
}


@dataclass
class Case:
    """FlagEmbedding's options, passages per query, and what runs the program: theirs, or ours."""

    options: tuple = ()
    group: int = 3
    program: str = "base"
    ours: bool = True
    cross: bool = True
    micro_steps: int = 1
    model: str = "model"
    trained_temperature: bool = False


@dataclass
class Run:
    """The weights at the end by their names, and the logged losses."""

    weights: dict = field(default_factory=dict)
    losses: list = field(default_factory=list)


def make_files(folder):
    """Write a random BERT with its tokenizer, and queries with a positive and six scored negatives."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    inner = Tokenizer(models.WordLevel({word: k for k, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "eos_token": "[SEP]",
    }
    PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=32, **special).save_pretrained(
        folder / "tokenizer"
    )
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    size |= {"vocab_size": len(vocabulary), "max_position_embeddings": 32, "initializer_range": 0.5}
    config = BertConfig(**size, **dropout)
    for name, dtype in (("model", torch.float64), ("float32", torch.float32)):
        shutil.copytree(folder / "tokenizer", folder / name)
        BertModel(config).to(dtype).save_pretrained(folder / name)
    chance = random.Random(1)

    def text():
        return " ".join(chance.choices(WORDS, k=chance.randint(2, 7)))

    def row(negatives):
        return {
            "query": text(),
            "pos": [text()],
            "neg": [text() for _ in range(negatives)],
            "pos_scores": [chance.uniform(0, 3)],
            "neg_scores": [chance.uniform(0, 3) for _ in range(negatives)],
        }

    for group in (1, 2, 3):
        rows = [row(max(group - 1, 1)) for _ in range(ROWS * STEPS * 2)]
        (folder / f"data{group}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def truth(case):
    """Return the case of FlagEmbedding's own loss in one process, on the whole batch."""
    return replace(case, ours=False, cross=False)


def run(folder, cases, ranks):
    """Run FlagEmbedding's program for each case, one after the other; return the runs by case."""
    run_ranks(_train, ranks, free_port(), str(folder), cases, timeout_s=500)
    return {repr(case): _read(folder / f"{ranks}-{index}") for index, case in enumerate(cases)}


def arguments(folder, case, ranks, out):
    micro = ROWS // ranks // case.micro_steps
    # Their Trainer and accelerate both divide by the micro-steps before transformers 5.10; plain SGD makes up for it.
    divided_again = case.micro_steps if not case.ours and TRANSFORMERS.is_older("5.10") else 1
    return [
        "--model_name_or_path", f"{folder}/{case.model}", "--train_data", f"{folder}/data{case.group}.jsonl",
        "--train_group_size", str(case.group), "--output_dir", out, "--cache_path", f"{folder}/cache",
        "--per_device_train_batch_size", str(micro), "--gradient_accumulation_steps", str(case.micro_steps),
        "--max_steps", str(STEPS), "--learning_rate", str(0.02 * divided_again), "--optim", "sgd",
        "--max_grad_norm", "0", "--lr_scheduler_type", "constant",
        "--weight_decay", "0", "--use_cpu", "True", "--report_to", "none",
        "--logging_steps", "1", "--save_steps", str(STEPS), "--disable_tqdm", "True", "--temperature", "0.1",
        "--negatives_cross_device", str(case.cross), *case.options,
    ]  # fmt: skip


def _train(port, folder, cases):
    import torch.distributed as dist

    as_launched(port)
    os.environ["HF_HUB_OFFLINE"] = "1"
    ranks = dist.get_world_size()
    from wholebatch.integrations.flag_embedding import main

    for index, case in enumerate(cases):
        argv = arguments(folder, case, ranks, f"{folder}/{ranks}-{index}")
        if case.trained_temperature:
            _train_temperature()
        if case.ours:
            assert main(["-m", PROGRAMS[case.program], *argv]) == 0
        else:
            sys.argv = [PROGRAMS[case.program], *argv]
            runpy.run_module(PROGRAMS[case.program], run_name="__main__", alter_sys=True)


def _train_temperature():
    """Let the model's temperature be a parameter, as a subclass of the user may."""
    from FlagEmbedding.abc.finetune.embedder.AbsModeling import AbsEmbedderModel

    build = AbsEmbedderModel.__init__

    def init(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.temperature = torch.nn.Parameter(torch.tensor(float(self.temperature)))

    AbsEmbedderModel.__init__ = init


def _read(out):
    from safetensors.torch import load_file

    log = json.loads((Path(out) / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    named = {_current(name): x for name, x in load_file(Path(out) / "model.safetensors").items()}
    return Run(named, [entry["loss"] for entry in log if "loss" in entry])


def _current(name):
    """Return today's name of a weight: transformers 5.3 saves those of a BERT by names of TensorFlow."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def flat(weights):
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])
