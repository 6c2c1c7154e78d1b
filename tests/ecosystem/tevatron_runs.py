"""Runs of Tevatron's retriever driver with a tiny encoder and random texts, for tests.

The driver is called in float64: its model is converted after it has been built. Everything else is Tevatron's.
"""

import json
import os
import random
import sys
from functools import partial
from pathlib import Path

import torch
from dual import as_launched, free_port

from wholebatch.integrations._framework import TRANSFORMERS
from wholebatch.testing import run_ranks

STEPS, ROWS, ACCUMULATION = 20, 8, 2
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sort", "find", "read", "write", "open", "close", "list", "file"]
TRAINING = [
    *("--train_group_size", "3", "--max_steps", str(STEPS), "--optim", "sgd", "--lr_scheduler_type", "constant"),
    *("--warmup_ratio", "0", "--max_grad_norm", "0", "--use_cpu", "--attn_implementation", "eager"),
    *("--report_to", "none", "--save_strategy", "no", "--logging_steps", "1", "--disable_tqdm", "true"),
]
SETTINGS = {
    "plain": ["--learning_rate", "0.01"],
    "temperature": ["--learning_rate", "0.05", "--normalize", "--temperature", "0.1"],
    "accumulation": ["--learning_rate", "0.01", "--gradient_accumulation_steps", str(ACCUMULATION)],
}
CACHED = ["--grad_cache", "--gc_q_chunk_size", "3", "--gc_p_chunk_size", "5"]


def folder_of(variable):
    """Return the source folder of a checkout that an environment variable names, or None."""
    return str(Path(os.environ[variable]) / "src") if variable in os.environ else None


def make_files(folder):
    """Write a model with random weights, a tokenizer of words, and queries with passages."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=len(WORDS), **sizes, **dropout)).save_pretrained(folder / "model")
    chosen = random.Random(0)

    def passage():
        return {"docid": "", "title": "", "text": text()}

    def text():
        return " ".join(chosen.choices(WORDS[5:], k=chosen.randint(2, 8)))

    rows = [
        {"query_id": str(k), "query": text(), "positive_passages": [passage()], "negative_passages": [passage()] * 3}
        for k in range(5 * ROWS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(folder, setting, cached, ranks, name, *, theirs=False):
    """Return the options of the driver, `theirs` for Tevatron's own loss.

    Before transformers 5.10 the Trainer and accelerate both divide their loss by the micro-steps; the learning rate of
    plain SGD makes up for it.
    """
    divided_again = theirs and not cached and setting == "accumulation" and TRANSFORMERS.is_older("5.10")
    return [
        *("--model_name_or_path", str(folder / "model"), "--dataset_path", str(folder / "train.jsonl")),
        *("--dataset_cache_dir", str(folder / f"cache {name}"), "--output_dir", str(folder / name)),
        *("--per_device_train_batch_size", str(ROWS // ranks)),
        *TRAINING,
        *SETTINGS[setting],
        *(CACHED if cached else []),
        *(["--learning_rate", str(0.01 * ACCUMULATION)] if divided_again else []),
    ]


def train(argv):
    """Run the driver in this process; return the weights before and after, and the logged losses."""
    from tevatron.retriever.driver import train as driver
    from tevatron.retriever.trainer import TevatronTrainer

    kept = {}
    build, log = driver.DenseModel.build, TevatronTrainer.log

    def build_double(*args, **kwargs):
        kept["model"] = build(*args, **kwargs).double()
        kept["start"] = weights(kept["model"])
        return kept["model"]

    def logged(self, values, *args, **kwargs):
        kept.setdefault("losses", []).extend([values["loss"]] if "loss" in values else [])
        return log(self, values, *args, **kwargs)

    driver.DenseModel.build, TevatronTrainer.log = build_double, logged
    before = sys.argv
    sys.argv = ["train", *argv]
    try:
        driver.main()
    finally:
        driver.DenseModel.build, TevatronTrainer.log, sys.argv = build, log, before
    return kept["start"], weights(kept["model"]), kept["losses"]


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def import_from(folders):
    """Let programs import packages of these folders."""
    sys.path[:0] = [folder for folder in folders if folder]


def body(port, folder, folders, jobs, whose):
    import_from(folders)
    as_launched(port)
    if whose == "ours":
        from wholebatch.integrations import tevatron

        tevatron.install()
        tevatron.install()  # without effect
    if whose == "alias":
        from wholebatch.integrations import grad_cache

        grad_cache.install()
    theirs = whose == "theirs"
    return {job: train(arguments(folder, *job, 2, f"{whose} {' '.join(map(str, job))}", theirs=theirs)) for job in jobs}


def on_two_processes(folder, folders, jobs, whose):
    """Return the runs of both ranks, by (setting, cached); `whose` is "ours", "theirs", or "alias": of GradCache."""
    return run_ranks(partial(body, free_port(), folder, folders, jobs, whose), 2, timeout_s=300)
