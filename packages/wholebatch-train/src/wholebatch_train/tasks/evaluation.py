"""Held-out rows: their features, figures of a search beside those of chance, and the verification of pairs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from wholebatch.app.tensors import SEARCH_DEPTH, SEARCH_KS, search_figures

from ..data.loader import prepared
from ..data.pairs import Pairs, Stated, other_items
from ..data.randomness import seeded
from ..data.sides import Side
from ..encoders.dual import DualEncoder
from ..encoders.encoder import Encoder, to_device
from .batches import Reader

_ROWS = 512  # that are encoded at a time, or fewer with a smaller `--chunk-size`


@torch.no_grad()
def features_of_rows(
    model: DualEncoder | Encoder,
    name: str,
    side: Side,
    rows: Tensor,
    device: torch.device,
    *,
    workers: int = 0,
    chunk_size: int = 0,
    ranks: int = 1,
) -> Tensor:
    """Return the unit features of these rows (n,) of a side, (n, d), on the CPU, without augmentation.

    Of one rank, this one does all of the work, whatever others do. With several each encodes a part, and only rank 0
    gets the features; the others get (0, d). Rows are encoded in the same parts on any number of ranks: part i by rank
    i mod W. After each turn the features go to rank 0, so that no rank waits longer than for one part. In the last turn
    a rank without a part encodes the last one again, because sharded weights need all ranks, and its features are
    dropped.
    """
    parts = rows.split(min(_ROWS, chunk_size or _ROWS))
    if ranks == 1:
        return torch.cat([x.cpu() for x in _encoded(model, name, side, parts, device, workers)])
    rank = dist.get_rank()
    turns = [[min(first + r, len(parts) - 1) for r in range(ranks)] for first in range(0, len(parts), ranks)]
    local = [parts[turn[rank]] for turn in turns]
    encoded: list[Tensor] = []
    for turn, features in zip(turns, _encoded(model, name, side, local, device, workers), strict=True):
        longest = max(len(parts[part]) for part in turn)
        padded = F.pad(features, (0, 0, 0, longest - len(features))).contiguous()
        gathered = [torch.empty_like(padded) for _ in range(ranks)] if rank == 0 else None
        dist.gather(padded, gathered, dst=0)
        for part, x in zip(dict.fromkeys(turn), gathered or [padded[:0]] * ranks, strict=False):
            encoded.append(x[: len(parts[part])].cpu())
    return torch.cat(encoded)


def _encoded(
    model: DualEncoder | Encoder, name: str, side: Side, parts: Sequence[Tensor], device: torch.device, workers: int
) -> Iterator[Tensor]:
    """Yield the features of each part, on the device."""
    for inputs in prepared(partial(Reader.of(model.encoder(name)), side), [*parts], workers=workers):
        yield model.encode(name, to_device(inputs, device)).float()


PLURAL = {"image": "images", "text": "texts", "query": "queries", "document": "documents"}
SHOWN = {"mrr": "MRR", "ndcg@10": "nDCG@10"}
"""Titles of figures, where they are not their keys."""
_MOST_DOCUMENTS = 200_000  # that a test searches


def recall(
    queries: Tensor, candidates: Tensor, right: Tensor | None = None, *, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Return recall@1, @5 and @10 as `search_figures` does."""
    means = search_figures(queries, candidates, right, device=device)
    return {name: value for name, value in means.items() if name.startswith("recall")}


def chance(candidates: int, right: Tensor) -> dict[str, float]:
    """Return the expected recall@1, @5, @10, MRR and nDCG@10 of a random order of n `candidates`.

    With m right ones among n candidates, the first one has a rank above k with probability C(n - k, m) / C(n, m).

    >>> chance(4, torch.tensor([2]))["recall@1"]
    0.5
    """
    numbers, number_index = torch.unique(right, return_inverse=True)
    weights = torch.bincount(number_index).double() / len(right)
    figures = dict.fromkeys((*(f"recall@{k}" for k in SEARCH_KS), "mrr", f"ndcg@{SEARCH_DEPTH}"), 0.0)
    ranks = torch.arange(1, candidates + 1, dtype=torch.float64)
    gains = 1 / torch.log2(1 + ranks[:SEARCH_DEPTH])
    for m, weight in zip(numbers.tolist(), weights.tolist(), strict=True):
        # later[k] = P(the first right one has a rank above k), the product of (n - m - i) / (n - i) over i < k
        later = ((candidates - m - ranks + 1).clamp(min=0) / (candidates - ranks + 1)).cumprod(0)
        for k in SEARCH_KS:
            figures[f"recall@{k}"] += weight * (1 - later[min(k, candidates) - 1].item())
        first = torch.cat([later.new_ones(1), later[:-1]]) - later
        figures["mrr"] += weight * (first / ranks).sum().item()
        figures[f"ndcg@{SEARCH_DEPTH}"] += weight * (m / candidates * gains.sum() / gains[:m].sum()).item()
    return figures


def ways_of(pairs: Pairs) -> tuple[str, str]:
    """Return the names of the two directions, such as image_to_text and text_to_image."""
    first, second = pairs.names
    return f"{first}_to_{second}", f"{second}_to_{first}"


def further_candidates(pairs: Pairs, stated: Stated) -> Tensor:
    """Return rows of the documents of other queries, which a test of queries searches, too; of other data no rows."""
    if pairs.names[1] != "document":
        return stated.rows[1][:0]
    return other_items(pairs, stated.rows[1])[: max(0, _MOST_DOCUMENTS - len(stated.rows[1]))]


def figures_of_way(
    queries: Tensor, candidates: Tensor, right: Tensor, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return the figures of one direction, the numbers of queries and of candidates, and the figures of chance."""
    counts = torch.bincount(right[0], minlength=len(queries))
    return {
        "queries": len(queries),
        "candidates": len(candidates),
        **search_figures(queries, candidates, right, device=device),
        "chance": chance(len(candidates), counts),
    }


def report_of_search(
    ways: Sequence[str], stated: Stated, first: Tensor, second: Tensor, *, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return the report on both directions, by the features of the held-out items of the first side and the second.

    Behind those of the second, (m, d), may be those of further candidates of the search for it.
    """
    forward = figures_of_way(first, second, stated.right, device)
    back = figures_of_way(second[: len(stated.rows[1])], first, stated.back, device)
    return {ways[0]: forward, ways[1]: back}


def table(report: Mapping[str, Any], ways: Sequence[str]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    results = [report[way] for way in ways]
    columns = list(results[0]["chance"])
    is_once = results[0]["chance"] == results[1]["chance"]
    rows, searches = [], []
    for way, result in zip(ways, results, strict=True):
        query, candidate = way.split("_to_")
        searches.append(f"{result['queries']:,} {PLURAL[query]} among {result['candidates']:,} {PLURAL[candidate]}")
        rows.append([f"{query} -> {candidate}", *(f"{result[name]:.4f}" for name in columns)])
        if not is_once or way == ways[1]:
            rows.append(["chance", *(f"{result['chance'][name]:.4f}" for name in columns)])
    title = f"Retrieval: {searches[0]}, and {searches[1]}; queries never seen in training"
    return title, ["", *(SHOWN.get(name, name) for name in columns)], rows


FAR = 1e-3
"""The false accept rate of the reports."""
_MOST = 10_000
"""Images whose pairs are compared: the time grows with their square."""


def verify(features: Tensor, labels: Tensor, device: torch.device | str) -> dict[str, Any]:
    """Return the figures of the verification of these unit rows (n, d) of classes (n,); None without pairs."""
    rows = rows_to_verify(labels)
    tar, threshold = accepted_at(features[rows], labels[rows], FAR, device=device)
    has_pairs = not math.isnan(tar)
    return {
        "images": len(rows), "far": FAR, "tar": tar if has_pairs else None,
        "threshold": threshold if has_pairs else None,
    }  # fmt: skip


def verification_row(figures: Mapping[str, Any], images: int) -> list[str]:
    """Return what `verify` found about some of so many images as the row of a table: its name and its value."""
    subset = "" if figures["images"] == images else f", {figures['images']:,} of the images"
    value = "no pairs" if figures["tar"] is None else f"{figures['tar']:.4f}"
    return [f"verification: TAR at FAR {figures['far']:g}{subset}", value]


def rows_to_verify(labels: Tensor) -> Tensor:
    """Return the rows (m,), in order, whose pairs are to be compared: all (n,), or about 10,000 of more.

    These are all rows of random classes, so that there are pairs of one class; of few large classes random rows.
    """
    if len(labels) <= _MOST:
        return torch.arange(len(labels))
    _, class_of_row, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    order = torch.randperm(len(labels), generator=seeded("rows to verify"))
    order = order[class_of_row[order].argsort(stable=True)]
    place = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[class_of_row[order]]
    order = order[place < max(2, _MOST // len(sizes))]
    turn = torch.randperm(len(sizes), generator=seeded("classes to verify"))
    return order[turn[class_of_row[order]].argsort(stable=True)][:_MOST].sort().values


def accepted_at(
    features: Tensor, labels: Tensor, far: float, *, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Return (TAR, threshold): the fraction of same-class pairs above the threshold that `far` of other pairs pass.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    >>> accepted_at(x, torch.tensor([0, 0, 1, 1]), 0.25)  # others: 0, 0, 0.6, 0.6; one of four may be accepted
    (1.0, 0.6000000238418579)
    """
    n = len(labels)
    same_pairs = int((torch.bincount(labels.unique(return_inverse=True)[1]).pow(2).sum() - n) // 2)
    other_pairs = n * (n - 1) // 2 - same_pairs
    allowed = int(far * other_pairs)
    if not same_pairs or not other_pairs:
        return float("nan"), float("nan")
    features, labels = features.to(device), labels.to(device)
    same, others, places = [], features.new_empty(0), torch.arange(n, device=device)
    for start in range(0, n, _ROWS):
        similarity = features[start : start + _ROWS] @ features.T
        later = places > places[start : start + len(similarity), None]
        alike = labels[start : start + _ROWS, None] == labels
        same.append(similarity[later & alike])
        others = torch.cat([others, similarity[later & ~alike]])
        others = others.topk(min(len(others), allowed + 1)).values  # those that may be accepted, and one more
    threshold = others[-1].item()
    return (torch.cat(same) > threshold).double().mean().item(), threshold


def best_possible(numbers: Sequence[int], labels: Tensor) -> float:
    """Return the largest accuracy of a method that sees only the pictures: equal ones get equal answers."""
    classes: dict[int, Counter[int]] = defaultdict(Counter)
    for number, label in zip(numbers, labels.tolist(), strict=True):
        classes[number][label] += 1
    return sum(max(counts.values()) for counts in classes.values()) / len(labels)
