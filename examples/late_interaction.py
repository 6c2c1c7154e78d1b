"""Find functions by their docstrings, with one vector for each text and with one vector for each word.

    python examples/late_interaction.py
    torchrun --nproc-per-node 2 examples/late_interaction.py     # the same up to rounding, which grows with the steps

Queries are the first sentences of docstrings. Documents are the functions: signature and body, without the docstring.
They are those of the standard library, NumPy and matplotlib, so nothing is downloaded. Whole files are held out. Tokens
are words, and the pieces of identifiers. Texts differ in length, so tokens are packed, with offsets.

The same small encoder is trained twice, from the same start, on the same batches. One run compares the means of the
token embeddings (`wb.InfoNCELoss`). The other lets each token of a query take its best match among a document's tokens
(`wb.MaxSimLoss`). Then `wb.max_sim` searches functions that no step has seen. A table shows how many are found. A
picture shows the token that each token of a query has taken.

Needs wholebatch[train].
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.train.encoders.words import tokenize

BUCKETS = 16384
ONE_VECTOR, MANY_VECTORS = "one vector", "one per token"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True)
class Config:
    """Search functions by their docstrings, with one vector for each text and with several."""

    steps: int = 200
    """Steps of each run, at least 1."""
    batch_size: int = 128
    """Pairs in the global batch."""
    seeds: int = 1
    """Runs of each kind. Each seed holds out other files and starts differently."""
    candidates: int = 1000
    """Held-out functions among which each docstring's function is searched."""
    query_tokens: int = 16
    """Most tokens of a docstring."""
    document_tokens: int = 48
    """Most tokens of a function."""
    embedding_size: int = 64
    """Length of a token's embedding, a multiple of 8; also of their mean."""
    learning_rate: float = 5e-3
    """Peak of AdamW's learning rate."""
    results: Path = Path("late_interaction.json")
    """File for the figures; the picture is written beside it."""


class Pair(NamedTuple):
    """The tokens of a docstring's first sentence and of its function."""

    file: str
    name: str
    query: tuple[str, ...]
    document: tuple[str, ...]


def split_words(text: str) -> list[str]:
    """Split a text into words in lower case, and identifiers into their pieces."""
    return [word.lower() for word in _WORD.findall(text)]


def functions(root: Path, file: Path, config: Config) -> Iterator[Pair]:
    """Yield the functions of a file below root whose docstring and code have four tokens or more."""
    try:
        source = (root / file).read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):  # tests of parsers
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring, end = ast.get_docstring(node), node.body[0].end_lineno
        if not docstring or end is None:
            continue
        query = split_words(re.split(r"\n\n|(?<=\.)\s", docstring)[0])[: config.query_tokens]
        code = [*lines[node.lineno - 1 : node.body[0].lineno - 1], *lines[end : node.end_lineno]]
        document = [*dict.fromkeys(split_words("\n".join(code)))][: config.document_tokens]  # each token once
        if len(query) >= 4 and len(document) >= 4:
            yield Pair(f"{root.name}/{file.as_posix()}", node.name, tuple(query), tuple(document))


def all_pairs(config: Config) -> list[Pair]:
    """Return the functions of the standard library, NumPy and matplotlib; each docstring and each function once."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in ("numpy", "matplotlib"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        roots.append(Path(spec.origin).parent)
    found: dict[tuple[str, ...], Pair] = {}
    for root in roots:
        for file in sorted(path.relative_to(root) for path in root.rglob("*.py")):
            if {"test", "tests", "idle_test", "site-packages", "_vendor"} & set(file.parts[:-1]):
                continue
            for pair in functions(root, file, config):
                found.setdefault(pair.query, pair)
    return [*{pair.document: pair for pair in found.values()}.values()]


def split(pairs: list[Pair], config: Config, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return functions to train on and functions to search; no file has both."""

    def draw(pair: Pair) -> bytes:
        return hashlib.sha256(f"{seed} {pair.file}".encode()).digest()

    files = sorted(pairs, key=draw)  # whole files in a random order
    if len(files) <= config.candidates + config.batch_size:
        raise SystemExit(
            f"late_interaction: there are {len(files)} functions; --candidates {config.candidates} and --batch-size "
            f"{config.batch_size} ask for more"
        )
    test = files[: config.candidates]
    train = [pair for pair in files[config.candidates :] if pair.file != test[-1].file]
    random.Random(seed).shuffle(test)
    return train, test


class Encoder(nn.Module):
    """Embeddings of tokens, of length 1, or their means; and the scale of similarities.

    A token is the mean of the vectors of its pieces, then a convolution over it and its two neighbors.
    """

    def __init__(self, kind: str, embedding_size: int) -> None:
        super().__init__()
        self.kind = kind
        self.pieces = nn.EmbeddingBag(BUCKETS, embedding_size, mode="mean")
        nn.init.normal_(self.pieces.weight, std=0.05)
        self.norm = nn.LayerNorm(embedding_size)
        self.context = nn.Conv1d(embedding_size, embedding_size, 3, padding=1)
        self.project = nn.Linear(embedding_size, embedding_size, bias=False)
        self.scale = wb.Scale(1 / 0.07)

    def forward(self, queries: list[tuple[str, ...]], documents: list[tuple[str, ...]]) -> tuple[Tensor, ...]:
        """Return the vectors and the offsets of queries, those of documents, and the scale."""
        return *self.embed(queries), *self.embed(documents), self.scale()

    def embed(self, texts: list[tuple[str, ...]]) -> tuple[Tensor, Tensor]:
        """Return the vectors of all texts, one text's after the other's, and where each text's start."""
        longest = max(map(len, texts), default=0)
        words, pieces, starts = tokenize([" ".join(text) for text in texts], max_words=longest, buckets=BUCKETS)
        there = words > 0
        x = F.embedding((words - 1).clamp(min=0), self.norm(self.pieces(pieces, starts))) * there[..., None]
        x = x + F.gelu(self.context(x.mT)).mT
        vectors, offsets = self.project(x[there]), F.pad(there.sum(1).cumsum(0), (1, 0))
        if self.kind == ONE_VECTOR:
            vectors = F.embedding_bag(torch.arange(len(vectors)), vectors, offsets[:-1], mode="mean")
            offsets = torch.arange(len(vectors) + 1)
        return F.normalize(vectors, dim=1), offsets


def loss_of(kind: str) -> Callable[..., Tensor]:
    """Return the loss of the global batch: each query's document among those of all ranks."""
    if kind == ONE_VECTOR:
        one_vector = wb.InfoNCELoss()
        return lambda q, _q, d, _d, scale: one_vector(q, d, logit_scale=scale)
    many_vectors = wb.MaxSimLoss(token_reduction="mean")  # a mean of cosines, so that the same scale suits both
    return lambda q, q_offsets, d, d_offsets, scale: many_vectors(
        q, d, scale, query_offsets=q_offsets, document_offsets=d_offsets
    )


def mine(rows: list[Any]) -> list[Any]:
    """Return this rank's part of the rows of all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return rows[wb.partition.Partition.even(len(rows), ranks).rows(rank)]


def train_encoder(kind: str, train: list[Pair], config: Config, seed: int) -> tuple[Encoder, list[float]]:
    """Return a trained encoder, the same on all ranks, and the loss of each step."""
    torch.manual_seed(seed)
    encoder = Encoder(kind, config.embedding_size)
    engine = DistributedDataParallel(encoder) if dist.is_initialized() else encoder
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=config.learning_rate, weight_decay=0.01)
    warm = max(config.steps // 5, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (config.steps - step) / (config.steps - warm + 1))
    )
    loss_fn, losses, order = loss_of(kind), list[float](), random.Random(seed)
    for _ in range(config.steps):
        batch = mine(order.sample(train, config.batch_size))  # all ranks draw the same global batch
        optimizer.zero_grad()
        loss = loss_fn(*engine([pair.query for pair in batch], [pair.document for pair in batch]))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return encoder, losses


@torch.no_grad()
def search(encoder: Encoder, test: list[Pair]) -> dict[str, float]:
    """Return how often a docstring's function is the best of all, and among the ten best."""
    here = mine(test)
    q, q_offsets, d, d_offsets, _ = encoder([pair.query for pair in here], [pair.document for pair in here])
    best = wb.max_sim(q, d, k=10, query_offsets=q_offsets, document_offsets=d_offsets)
    right = best.documents == torch.tensor(mine([*range(len(test))]))[:, None]
    found = torch.stack([right[:, 0].sum(), right.sum()])
    if dist.is_initialized():
        dist.all_reduce(found)
    return {"recall@1": found[0].item() / len(test), "recall@10": found[1].item() / len(test)}


def runs(pairs: list[Pair], config: Config, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each run, with its encoder."""
    for seed in range(config.seeds):
        train, test = split(pairs, config, seed)
        for kind in (ONE_VECTOR, MANY_VECTORS):
            start, cpu = time.monotonic(), time.process_time()
            encoder, losses = train_encoder(kind, train, config, seed)
            times = {"seconds": time.monotonic() - start, "cpu seconds": time.process_time() - cpu}
            found = search(encoder, test)
            recalls = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
            say(f"seed {seed}, {kind}: loss {losses[0]:.5f} at first, {losses[-1]:.5f} in the end; {recalls}")
            yield {"seed": seed, "vectors": kind, **found, **times, "losses": losses, "encoder": encoder, "test": test}


def spread(rows: list[dict[str, Any]], kind: str, measure: str, form: str) -> str:
    """Return the mean over seeds, and the smallest and the largest."""
    values = [row[measure] for row in rows if row["vectors"] == kind]
    mean = f"{sum(values) / len(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def table(rows: list[dict[str, Any]], title: str) -> Table:
    shown = Table(title=title)
    measures = {"recall@1": ".3f", "recall@10": ".3f", "cpu seconds": ".0f"}
    for name in ("vectors", *measures):
        shown.add_column(name, justify="left" if name == "vectors" else "right")
    for kind in (ONE_VECTOR, MANY_VECTORS):
        shown.add_row(kind, *(spread(rows, kind, measure, form) for measure, form in measures.items()))
    return shown


@torch.no_grad()
def token_scores(encoder: Encoder, pair: Pair) -> Tensor:
    """Return the cosine of each token of a query with each token of its document; the largest of a row is taken."""
    (q, _), (d, _) = encoder.embed([pair.query]), encoder.embed([pair.document])
    return q @ d.T


def some_pairs(test: list[Pair]) -> list[Pair]:
    """Return three held-out pairs of a length that can be shown. Their order is random."""
    return [pair for pair in test if 6 <= len(pair.query) <= 10 and 12 <= len(pair.document) <= 28][:3]


def picture(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the recall of both kinds, and the scores of the tokens of a few pairs."""
    from matplotlib.figure import Figure

    last = next(row for row in reversed(rows) if row["vectors"] == MANY_VECTORS)
    shown = some_pairs(last["test"])
    figure = Figure(figsize=(12, 2.4 + 3.2 * len(shown)), layout="constrained")
    figure.suptitle(title)
    top, *panels = figure.subplots(1 + len(shown), 1, height_ratios=[2, *[len(pair.query) for pair in shown]])
    labels = [f"{measure}, {kind}" for measure in ("recall@1", "recall@10") for kind in (ONE_VECTOR, MANY_VECTORS)]
    for place, label in enumerate(labels):
        measure, kind = label.split(", ")
        values = [row[measure] for row in rows if row["vectors"] == kind]
        bar = top.barh(place, sum(values) / len(values), color="0.6" if kind == ONE_VECTOR else "C0")
        top.bar_label(bar, labels=[spread(rows, kind, measure, ".3f")], padding=4)
    top.set(xlim=(0, 1), yticks=range(len(labels)), yticklabels=labels)
    top.invert_yaxis()
    top.spines[["top", "right"]].set_visible(False)
    for axes, pair in zip(panels, shown, strict=True):
        scores = token_scores(last["encoder"], pair)
        image = axes.imshow(scores.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for row, column in enumerate(scores.argmax(1).tolist()):
            value = scores[row, column].item()
            axes.add_patch(_box(column, row))
            color = "white" if value > 0.6 else "black"
            axes.text(column, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=8, color=color)
        taken = {*scores.argmax(1).tolist()}
        axes.set_yticks(range(len(pair.query)), pair.query)
        axes.set_xticks(range(len(pair.document)), pair.document, rotation=45, ha="right", rotation_mode="anchor")
        for column, text in enumerate(axes.get_xticklabels()):
            text.set(color="C3" if column in taken else "0.35", weight="bold" if column in taken else "normal")
        axes.set_title(
            f"{pair.name}(): each token of the docstring (rows) takes its best token of the function (columns); "
            f"their mean score is {scores.max(1).values.mean():.2f}",
            fontsize=10,
            loc="left",
        )
        figure.colorbar(image, ax=axes, pad=0.01)
    figure.savefig(path, dpi=120)


def _box(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="C3", linewidth=1.5)


def main() -> None:
    config = tyro.cli(Config)
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(quiet=not first)
    pairs = all_pairs(config)
    console.print(f"{len(pairs)} functions of {len({pair.file for pair in pairs})} files")
    rows = [*runs(pairs, config, console.print)]
    if first:
        title = f"Each docstring's function among {config.candidates} functions of files never seen"
        console.print(table(rows, title))
        picture(rows, title, config.results.with_suffix(".png"))
        figures = [{name: value for name, value in row.items() if name not in ("encoder", "test")} for row in rows]
        settings = {name: value for name, value in asdict(config).items() if name != "results"}
        about = {"torch": torch.__version__, "wholebatch": wb.__version__, "functions": len(pairs)}
        config.results.write_text(json.dumps({**about, **settings, "rows": figures}, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
