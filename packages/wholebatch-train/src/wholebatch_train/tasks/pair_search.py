"""The test of a dual encoder: a search both ways among held-out items, beside chance, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.pairs.answers import Stated, other_items
from ..data.pairs.pairs import Pairs
from .chance import chance
from .retrieval import figures

PLURAL = {"image": "images", "text": "texts", "query": "queries", "document": "documents"}
SHOWN = {"mrr": "MRR", "ndcg@10": "nDCG@10"}
"""Titles of figures, where they are not their keys."""

_MOST_DOCUMENTS = 200_000  # that a test searches


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
        **figures(queries, candidates, right, device=device),
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
