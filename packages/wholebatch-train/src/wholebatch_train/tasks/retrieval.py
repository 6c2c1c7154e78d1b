"""The report of a search: its figures (`search_figures`), those of chance beside them, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.app.tensors import SEARCH_DEPTH, SEARCH_KS, search_figures

from ..data.pairs.answers import Stated, other_items
from ..data.pairs.pairs import Pairs

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
    """Return the expected recall@1, @5, @10, MRR and nDCG@10 of a random order.

    With m right ones among n candidates, the first one has a rank above k with probability C(n - k, m) / C(n, m).

    Args:
        candidates: n.
        right: (number of queries,), the number of right candidates of each, at least 1.

    >>> chance(4, torch.tensor([2]))["recall@1"]
    0.5
    """
    numbers, of_query = torch.unique(right, return_inverse=True)
    weights = torch.bincount(of_query).double() / len(right)
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
    """Return the report on both directions.

    Args:
        ways: their names.
        stated: the held-out items.
        first: features of those of the first side, (n, d).
        second: the same of the second side, (m, d); behind them those of further candidates of the search for it.
        device: where similarities are computed.
    """
    forward = figures_of_way(first, second, stated.right, device)
    back = figures_of_way(second[: len(stated.rows[1])], first, stated.back, device)
    return {ways[0]: forward, ways[1]: back}


def table(report: Mapping[str, Any], ways: Sequence[str]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Return the report as a table: title, names of the columns, rows."""
    of_ways = [report[way] for way in ways]
    columns = list(of_ways[0]["chance"])
    is_once = of_ways[0]["chance"] == of_ways[1]["chance"]
    rows, searches = [], []
    for way, result in zip(ways, of_ways, strict=True):
        query, candidate = way.split("_to_")
        searches.append(f"{result['queries']:,} {PLURAL[query]} among {result['candidates']:,} {PLURAL[candidate]}")
        rows.append([f"{query} -> {candidate}", *(f"{result[name]:.4f}" for name in columns)])
        if not is_once or way == ways[1]:
            rows.append(["chance", *(f"{result['chance'][name]:.4f}" for name in columns)])
    title = f"Retrieval: {searches[0]}, and {searches[1]}; queries never seen in training"
    return title, ["", *(SHOWN.get(name, name) for name in columns)], rows
