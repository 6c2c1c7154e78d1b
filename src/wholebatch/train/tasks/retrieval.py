"""Figures of a search: recall@k, the mean reciprocal rank (MRR) and nDCG@10, in tiles, over any number of candidates.

    rank of a right candidate = 1 + the right ones before it + the wrong ones that are at least as similar
    MRR = mean of 1 / rank of the first right one
    nDCG@10 = sum over right ones of rank <= 10 of 1 / log2(1 + rank), divided by the same sum of the best order

Ties count against the query, and so do features that are not numbers: equal features are no success. nDCG: Järvelin
and Kekäläinen, 2002, ACM TOIS 20(4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

KS = (1, 5, 10)
_DEPTH = 10  # of nDCG
_TILE = 2**24  # similarities that are held at a time


def ranks_of_partner(queries: Tensor, candidates: Tensor) -> Tensor:
    """Return how many other candidates are at least as similar to query i as candidate i, (n,), from (n, d) each."""
    same = torch.arange(len(queries))
    return torch.cat([ranks[:, 0].long() for ranks, _ in _ranks(queries, candidates, same, same)])


def figures(
    queries: Tensor, candidates: Tensor, query_groups: Tensor | None = None, candidate_groups: Tensor | None = None
) -> dict[str, float]:
    """Return recall@1, @5, @10 (a right candidate is among the k best), MRR and nDCG@10, means over the queries.

    Args:
        queries: (n, d).
        candidates: (m, d).
        query_groups: (n,); None: query i belongs to candidate i alone.
        candidate_groups: (m,): candidates of a query's group are right. Each query has one.
    """
    if query_groups is None or candidate_groups is None:
        query_groups = candidate_groups = torch.arange(len(queries))
    found = dict.fromkeys((*(f"recall@{k}" for k in KS), "mrr", f"ndcg@{_DEPTH}"), 0.0)
    best = (1 / torch.log2(2 + torch.arange(_DEPTH, dtype=torch.float64))).cumsum(0)
    for ranks, count in _ranks(queries, candidates, query_groups, candidate_groups):
        first = ranks[:, 0]
        for k in KS:
            found[f"recall@{k}"] += (first < k).sum().item()
        found["mrr"] += (1 / (1 + first)).sum().item()
        gains = torch.where(ranks < _DEPTH, 1 / torch.log2(2 + ranks), 0.0).sum(1)
        found[f"ndcg@{_DEPTH}"] += (gains / best[count.clamp(max=_DEPTH) - 1]).sum().item()
    return {name: value / len(queries) for name, value in found.items()}


def recall(queries: Tensor, candidates: Tensor) -> dict[str, float]:
    """Return {"recall@k": fraction of queries whose partner is among the k best}; chance is k / n."""
    return {name: value for name, value in figures(queries, candidates).items() if name.startswith("recall")}


def chance(candidates: int) -> dict[str, float]:
    """Return the figures of a random order, of queries with one right candidate each.

    >>> chance(2)["mrr"]
    0.75
    """
    found = {f"recall@{k}": min(1.0, k / candidates) for k in KS}
    found["mrr"] = math.fsum(1 / rank for rank in range(1, candidates + 1)) / candidates
    shown = range(min(_DEPTH, candidates))
    return found | {f"ndcg@{_DEPTH}": math.fsum(1 / math.log2(2 + place) for place in shown) / candidates}


def _ranks(
    queries: Tensor, candidates: Tensor, query_groups: Tensor, candidate_groups: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for some queries at a time the ranks, from 0, of their best right candidates, and the number of all.

    Yields:
        (rows, r) float64, in ascending order, infinity where a query has fewer; and (rows,).
    """
    size = max(1, _TILE // len(candidates))
    for start in range(0, len(queries), size):
        similarity = queries[start : start + size] @ candidates.T
        right = query_groups[start : start + size, None] == candidate_groups
        count = right.sum(1)
        most = min(_DEPTH, int(count.max()))
        best = similarity.masked_fill(~right, float("-inf")).topk(most, dim=1).values
        wrong = similarity.masked_fill_(right, float("-inf"))
        before = torch.stack([(~(wrong < best[:, place, None])).sum(1) for place in range(most)], dim=1)
        ranks = (before + torch.arange(most)).double()
        ranks[torch.arange(most) >= count[:, None]] = float("inf")
        yield ranks, count
