"""Fine-tune a sentence encoder to find functions by their docstrings, with batches that do not fit into memory.

    python examples/code_search.py --model FOLDER_OR_HUB_NAME

Pairs are the docstrings and bodies of the functions in the standard library and in the installed packages of the
running interpreter. Whole packages are held out: no training step has seen the functions of the final search.
Batches of 64, 256 and 1024 pairs train on the same pairs, equally often. By gradient caching they need the same memory,
that of a chunk. A table and a picture show the gain of the larger batch.

Needs wholebatch-train and transformers. Without a network, --model takes any folder with a model's files. The runs
follow each other in one process, from the smallest batch to the largest: its peak memory shows no growth.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import random
import resource
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb


@dataclass(frozen=True)
class Settings:
    """The model, the data, and how the model is trained on them."""

    model: str
    """Name on the hub, or a folder with a transformers model and its tokenizer."""
    pairs: int = 16384
    """Pairs that each run trains on, once."""
    candidates: int = 1000
    """Held-out functions among which each docstring's function is searched."""
    chunk_size: int = 32
    """Pairs that are encoded at a time, which bounds the memory for every batch size."""
    keep_graphs: float = 0.0
    """Part of the chunks that keep their activations for the backward pass: more memory, less time."""
    learning_rate: float = 1e-4
    """Peak of AdamW's learning rate for a batch of 256; it grows with the square root of the batch."""
    doc_tokens: int = 24
    """Most tokens of a docstring."""
    code_tokens: int = 64
    """Most tokens of a body."""
    seed: int = 0
    """Seed of the split, the order and dropout."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where the encoder runs."""


@dataclass(frozen=True)
class Config(Settings):
    """Fine-tune a sentence encoder on docstrings and function bodies."""

    batch_sizes: tuple[int, ...] = (64, 256, 1024)
    """Pairs in the global batch, one run for each size."""
    results: Path = Path("code_search.json")
    """File for the figures; the picture is written beside it."""


@dataclass(frozen=True)
class Pair:
    """The docstring and the body of a function."""

    package: str
    docstring: str
    body: str


def functions(file: Path, package: str) -> Iterator[Pair]:
    """Yield the functions of a file that have a docstring of four words or more and a body of three lines or more."""
    try:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):  # tests of parsers, files for other versions of Python
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
    """Return the functions of the standard library and of installed packages; each docstring and body once."""
    paths, found = sysconfig.get_paths(), {}
    for root in dict.fromkeys((paths["stdlib"], paths["platlib"], paths["purelib"])):
        for file in sorted(Path(root).rglob("*.py")):
            inside = file.relative_to(root).parts
            if {"test", "tests", "site-packages", "_vendor"} & set(inside[:-1]):
                continue
            for pair in functions(file, inside[0].removesuffix(".py")):
                found.setdefault(pair.docstring, pair)
    return [*{pair.body: pair for pair in found.values()}.values()]


def split(pairs: list[Pair], config: Settings) -> tuple[list[Pair], list[Pair]]:
    """Return functions to train on and functions to search, with no package in both."""

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
            f"this interpreter's packages have {len(train)} functions to train on and {len(test)} to "
            f"search; --pairs {config.pairs} and --candidates {config.candidates} ask for more"
        )
    return train[: config.pairs], test[: config.candidates]


def pretrained(name: str) -> Any:
    """Return a transformer, without the layer over its first state that some have, of which nothing here makes use."""
    from transformers import AutoModel

    transformer = AutoModel.from_pretrained(name)
    if hasattr(transformer, "pooler"):
        transformer.pooler = None  # DistributedDataParallel wants a gradient of each parameter
    return transformer


class Encoder(nn.Module):
    """A transformer whose embedding is the unit mean of its last states, and the scale of similarities."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.transformer = pretrained(name)
        self.log_scale = nn.Parameter(torch.tensor(20.0).log())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return unit_mean(states, attention_mask), self.log_scale.exp()


def unit_mean(states: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the mean of the states that have a token, of length 1: (b, tokens, d), (b, tokens) -> (b, d)."""
    mask = attention_mask[..., None]
    return normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def tokens(tokenizer: Any, pairs: list[Pair], config: Settings) -> list[Any]:
    """Tokenize the docstrings and the bodies."""
    sides = ([pair.docstring for pair in pairs], config.doc_tokens), ([pair.body for pair in pairs], config.code_tokens)
    return [
        tokenizer(
            texts, truncation=True, max_length=length, padding=True, return_token_type_ids=False, return_tensors="pt"
        ).to(config.device)
        for texts, length in sides
    ]


@torch.no_grad()
def search(encoder: Encoder, tokenizer: Any, pairs: list[Pair], config: Config) -> dict[str, float]:
    """Return the mean reciprocal rank of each docstring's body among all bodies, and how often it is in the top ten."""
    encoder.eval()
    found = []
    for start in range(0, len(pairs), config.chunk_size):
        sides = tokens(tokenizer, pairs[start : start + config.chunk_size], config)
        found.append([encoder(**side)[0] for side in sides])
    docs, bodies = (torch.cat(side) for side in zip(*found, strict=True))
    similar = docs @ bodies.T
    ranks = 1 + (similar > similar.diagonal()[:, None]).sum(1)
    return {"MRR": (1 / ranks).mean().item(), "recall@10": (ranks <= 10).double().mean().item()}


def clip_loss(docs: tuple[Tensor, Tensor], bodies: tuple[Tensor, Tensor]) -> Tensor:
    (x, scale), (y, _) = docs, bodies
    return wb.functional.clip_loss(x, y, scale)


def rows_of_rank(rows: list[Any]) -> list[Any]:
    """Return this rank's part of the rows of all ranks; all of them in a single process."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return rows[wb.partition.Partition.even(len(rows), ranks).rows(rank)]


def train(
    encoder: nn.Module,
    tokenizer: Any,
    pairs: list[Pair],
    batch_size: int,
    config: Settings,
    loss_fn: Callable[..., Tensor] = clip_loss,
) -> list[float]:
    """Train for one pass over the pairs, which all ranks share; return the losses.

    The encoder maps the tokens of one side to the tuple of tensors that `loss_fn` takes of both sides.
    """
    encoder.train()
    engine = DistributedDataParallel(encoder) if dist.is_initialized() else encoder
    rate = config.learning_rate * (batch_size / 256) ** 0.5
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=rate, weight_decay=0.01)
    steps = len(pairs) // batch_size
    warm = max(steps // 5, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / (steps - warm + 1))
    )
    step = wb.GradCache([engine, engine], config.chunk_size, loss_fn, keep_graphs=config.keep_graphs)
    losses = []
    for number in range(steps):
        batch = rows_of_rank(pairs[number * batch_size : (number + 1) * batch_size])
        optimizer.zero_grad()
        loss = step(*tokens(tokenizer, batch, config))
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if not dist.is_initialized() or dist.get_rank() == 0:
            end = "\n" if number + 1 == steps else ""
            print(f"\rbatch {batch_size}: step {number + 1} of {steps}, loss {loss:.3f} ", end=end, flush=True)
    return losses


def peak_memory(device: str) -> float:
    """Return the peak memory of the process so far, or of its GPU since the last call, in MB."""
    if device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated() / 1e6
        torch.cuda.reset_peak_memory_stats()
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def runs(tokenizer: Any, pairs: list[Pair], held_out: list[Pair], config: Config) -> Iterator[dict[str, Any]]:
    """Yield the figures of the encoder before training, and after training with each batch size."""
    for batch_size in (0, *sorted(config.batch_sizes)):
        torch.manual_seed(config.seed)
        encoder, start, cpu = Encoder(config.model).to(config.device), time.monotonic(), time.process_time()
        losses = train(encoder, tokenizer, pairs, batch_size, config) if batch_size else []
        times = {"seconds": time.monotonic() - start, "cpu seconds": time.process_time() - cpu}
        found = search(encoder, tokenizer, held_out, config)
        yield {
            "batch": batch_size or "before",
            "steps": len(losses),
            **times,
            "peak MB": peak_memory(config.device),
            **found,
            "losses": losses,
        }


def table(rows: list[dict[str, Any]], title: str) -> Table:
    shown = Table(title=title)
    for name in ("batch size", "steps", "minutes", "peak MB", "MRR", "recall@10"):
        shown.add_column(name, justify="right")
    for row in rows:
        minutes = f"{row['seconds'] / 60:.1f}"
        figures = (f"{row['peak MB']:.0f}", f"{row['MRR']:.3f}", f"{row['recall@10']:.3f}")
        shown.add_row(str(row["batch"]), str(row["steps"]), minutes, *figures)
    return shown


def picture(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axis, measure, form in zip(axes, ("MRR", "recall@10", "peak MB"), ("%.3f", "%.3f", "%.0f"), strict=True):
        names = [str(row["batch"]) for row in rows]
        bars = axis.bar(names, [row[measure] for row in rows], color=["0.6", *["C0"] * (len(rows) - 1)])
        axis.bar_label(bars, fmt=form, fontsize=8)
        axis.set(title=measure, xlabel="batch size", ylim=(0, 1.15 * max(row[measure] for row in rows)))
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    config = tyro.cli(Config)
    if not all(1 < size <= config.pairs for size in config.batch_sizes):
        raise SystemExit(f"code_search: --batch-sizes must lie between 2 and --pairs {config.pairs}")
    from transformers import AutoTokenizer

    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    pairs, held_out = split(all_pairs(), config)
    packages = [len({pair.package for pair in side}) for side in (pairs, held_out)]
    console.print(
        f"{len(pairs)} functions of {packages[0]} packages to train on, {len(held_out)} of {packages[1]} others to find"
    )
    rows = []
    for row in runs(tokenizer, pairs, held_out, config):
        rows.append(row)
        about = {"torch": torch.__version__, "wholebatch": wb.__version__, "machine": platform.machine()}
        settings = {name: value for name, value in asdict(config).items() if name not in ("model", "results")}
        config.results.write_text(
            json.dumps({**about, **settings, "packages": packages, "rows": rows}, indent=1) + "\n"
        )
    title = f"Each docstring's function among {len(held_out)} never seen"
    console.print(table(rows, title))
    picture(rows, title, config.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
