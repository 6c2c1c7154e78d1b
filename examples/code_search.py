"""Fine-tune a sentence encoder to find functions by what their docstrings say, with batches that do not fit.

    python examples/code_search.py --model FOLDER_OR_HUB_NAME

Pairs are docstrings and bodies of the functions in the standard library and in the installed packages of the
interpreter that runs this. Whole packages are held out: what is searched in the end, no training step has seen.
Contrastive batches of 64, 256 and 1024 pairs train on the same pairs in the same memory, that of a chunk, by gradient
caching; a table and a picture show what the larger batch is worth.

Needs wholebatch[train] and transformers. Without a network, any folder with a model's files will do for --model.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb


@dataclass(frozen=True)
class Config:
    """Fine-tune a sentence encoder on docstrings and function bodies."""

    model: str
    """Name on the hub, or a folder with a transformers model and its tokenizer."""
    batch_sizes: tuple[int, ...] = (64, 256, 1024)
    """Pairs in a contrastive batch, a run each."""
    pairs: int = 4096
    """Pairs that each run trains on."""
    candidates: int = 1000
    """Held-out functions among which each docstring's own is searched."""
    chunk_size: int = 32
    """Pairs that are encoded at a time: this bounds the memory, whatever the batch."""
    learning_rate: float = 1e-4
    """Peak of AdamW's, scaled with the square root of the batch over 256."""
    doc_tokens: int = 32
    """Of a docstring, at most."""
    code_tokens: int = 96
    """Of a body, at most."""
    seed: int = 0
    """Of the split and the order."""
    results: Path = Path("code_search.json")
    """Where the figures go; the picture lies beside it."""


@dataclass(frozen=True)
class Pair:
    """A function."""

    package: str
    docstring: str
    body: str


def functions(file: Path, package: str) -> Iterator[Pair]:
    """Those of a file that have a docstring of a sentence and a body of three lines."""
    try:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):  # tests of parsers, files of other Pythons
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        if docstring is None:
            continue
        sentence = " ".join(docstring.split("\n\n")[0].split())
        lines = source.splitlines()[node.body[1].lineno - 1 : node.end_lineno]
        body = textwrap.dedent("\n".join(lines)).strip()
        if len(sentence.split()) >= 4 and len(lines) >= 3:
            yield Pair(package, sentence, body)


def all_pairs() -> list[Pair]:
    """Of the standard library and of the installed packages; each docstring and each body once."""
    paths, found = sysconfig.get_paths(), {}
    for root in dict.fromkeys((paths["stdlib"], paths["platlib"], paths["purelib"])):
        for file in sorted(Path(root).rglob("*.py")):
            inside = file.relative_to(root).parts
            if {"test", "tests", "site-packages", "_vendor"} & set(inside[:-1]):
                continue
            for pair in functions(file, inside[0].removesuffix(".py")):
                found.setdefault(pair.docstring, pair)
    return [*{pair.body: pair for pair in found.values()}.values()]


def split(pairs: list[Pair], config: Config) -> tuple[list[Pair], list[Pair]]:
    """To train on, and to search in: no package on both sides."""

    def held_out(package: str) -> bool:
        return hashlib.sha256(f"{config.seed} {package}".encode()).digest()[0] < 64  # a quarter

    order = random.Random(config.seed)
    train, test = [], []
    for pair in pairs:
        (test if held_out(pair.package) else train).append(pair)
    order.shuffle(train)
    order.shuffle(test)
    if len(train) < config.pairs or len(test) < config.candidates:
        raise SystemExit(
            f"code_search: this interpreter's packages have {len(train)} functions to train on and {len(test)} to "
            f"search in; --pairs {config.pairs} and --candidates {config.candidates} ask for more"
        )
    return train[: config.pairs], test[: config.candidates]


class Encoder(nn.Module):
    """A transformer, the mean of its last states as a unit vector; and the scale of similarities."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from transformers import AutoModel

        self.transformer = AutoModel.from_pretrained(name)
        self.log_scale = nn.Parameter(torch.tensor(20.0).log())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return normalize((states * mask).sum(1) / mask.sum(1), dim=1), self.log_scale.exp()


def tokens(tokenizer: Any, texts: list[str], length: int) -> dict[str, Tensor]:
    found = tokenizer(texts, truncation=True, max_length=length, padding=True, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def search(encoder: Encoder, tokenizer: Any, pairs: list[Pair], config: Config) -> dict[str, float]:
    """Mean reciprocal rank of each docstring's own body among all bodies, and how often it is among ten."""
    encoder.eval()
    sides = []
    for texts, length in (
        ([pair.docstring for pair in pairs], config.doc_tokens),
        ([pair.body for pair in pairs], config.code_tokens),
    ):
        parts = [encoder(**tokens(tokenizer, texts[k : k + 64], length))[0] for k in range(0, len(texts), 64)]
        sides.append(torch.cat(parts))
    similar = sides[0] @ sides[1].T
    ranks = 1 + (similar > similar.diagonal()[:, None]).sum(1)
    return {"MRR": (1 / ranks).mean().item(), "recall@10": (ranks <= 10).double().mean().item()}


def loss_fn(docs: tuple[Tensor, Tensor], bodies: tuple[Tensor, Tensor]) -> Tensor:
    (x, scale), (y, _) = docs, bodies
    return wb.functional.clip_loss(x, y, scale)


def train(encoder: Encoder, tokenizer: Any, pairs: list[Pair], batch_size: int, config: Config) -> list[float]:
    """One pass over the pairs; the losses."""
    encoder.train()
    rate = config.learning_rate * (batch_size / 256) ** 0.5
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=rate, weight_decay=0.01)
    steps = len(pairs) // batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.2)
    step = wb.GradCache([encoder, encoder], config.chunk_size, loss_fn)
    losses = []
    for number in range(steps):
        batch = pairs[number * batch_size : (number + 1) * batch_size]
        optimizer.zero_grad()
        loss = step(
            tokens(tokenizer, [pair.docstring for pair in batch], config.doc_tokens),
            tokens(tokenizer, [pair.body for pair in batch], config.code_tokens),
        )
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, measure in zip(axes, ("MRR", "recall@10"), strict=True):
        names = [str(row["batch"]) for row in rows]
        bars = axis.bar(names, [row[measure] for row in rows], color=["0.6", *["C0"] * (len(rows) - 1)])
        axis.bar_label(bars, fmt="%.3f")
        axis.set(title=measure, xlabel="contrastive batch", ylim=(0, 1.15 * max(row[measure] for row in rows)))
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    config = tyro.cli(Config)
    from transformers import AutoTokenizer

    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    pairs, held_out = split(all_pairs(), config)
    packages = [len({pair.package for pair in side}) for side in (pairs, held_out)]
    console.print(
        f"{len(pairs)} functions of {packages[0]} packages to train on, {len(held_out)} of {packages[1]} others to find"
    )
    rows = []
    for batch_size in (0, *config.batch_sizes):
        torch.manual_seed(config.seed)
        encoder, start, losses = Encoder(config.model), time.monotonic(), [float("nan")]
        if batch_size:
            losses = train(encoder, tokenizer, pairs, batch_size, config)
        seconds = time.monotonic() - start
        row = {"batch": batch_size or "before", "steps": len(pairs) // batch_size if batch_size else 0}
        rows.append(row | {"seconds": seconds, "last loss": losses[-1], **search(encoder, tokenizer, held_out, config)})
        console.print({name: round(x, 4) if isinstance(x, float) else x for name, x in rows[-1].items()})
    table = Table(title=f"Each docstring's own function among {len(held_out)} never seen")
    for name in ("batch", "steps", "seconds", "MRR", "recall@10"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            str(row["steps"]),
            f"{row['seconds']:.0f}",
            f"{row['MRR']:.3f}",
            f"{row['recall@10']:.3f}",
        )
    console.print(table)
    config.results.write_text(json.dumps({"rows": rows, "pairs": len(pairs), "packages": packages}, indent=1) + "\n")
    picture(rows, config.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
