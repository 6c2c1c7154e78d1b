"""Every program of docs/trainers.md and docs/trainers_engines.md runs on two processes; its ranks print the same loss.

make ecosystem
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("trainers", "trainers_engines"))
PROGRAMS = dict(re.findall(r"^## ([^\n]+)\n\n```py\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))
# Without the interpreter's teardown, in which gloo's threads abort any DDP program now and then (torch 2.13).
END = "\nimport os, sys\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"
WORDS = "sort find read write open close list file line word number sum the"


def small_sentence_encoder(folder):
    """Save a sentence encoder with random weights, under a name that the hub has too."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", *WORDS.split()]
    inner = Tokenizer(models.WordLevel({word: k for k, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(folder / "bert")
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    ).save_pretrained(folder / "bert")
    modules = [Transformer(str(folder / "bert")), Pooling(16, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "all-MiniLM-L6-v2"))


def printed_losses(text):
    """Return the losses that each rank printed, or those that rank 0's trainer logged."""
    of_ranks = [re.findall(rf"rank {rank}: (\d+\.\d+)", text) for rank in (0, 1)]
    return of_ranks if any(of_ranks) else [re.findall(r"'loss': '?(\d+\.\d+)", text)] * 2


def test_every_program_is_below_a_heading():
    assert len(PROGRAMS) == PAGE.count("```py\n")
    assert len(PROGRAMS) >= 5


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_page_runs(name, tmp_path):
    program = PROGRAMS[name]
    launcher = []
    if "# torchrun" in program:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "program.py").write_text(program + END)
    if "SentenceTransformer(" in program:
        small_sentence_encoder(tmp_path)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, *launcher, "program.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    losses = printed_losses(run.stdout + run.stderr)
    assert losses[0], run.stdout[-2000:]
    assert losses[0] == losses[1]
