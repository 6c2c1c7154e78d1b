"""Figures of a search: recall@k, the mean reciprocal rank (MRR) and nDCG@10, in tiles, over any number of candidates.

    rank of a right candidate = 1 + the right ones before it + the wrong ones that are at least as similar
    recall@k = fraction of queries with a right candidate among the k best, as in the evaluation of retrieval on COCO
    MRR = mean of 1 / rank of the first right one
    nDCG@10 = sum over right ones of rank <= 10 of 1 / log2(1 + rank), divided by the same sum of the best order

Ties count against the query, and so do features that are not numbers: equal features are no success. nDCG: Järvelin
and Kekäläinen, 2002, ACM TOIS 20(4).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

KS = (1, 5, 10)
DEPTH = 10
"""Of nDCG."""
_TILE = 2**24  # similarities that are held at a time


def search_figures(
    queries: Tensor, candidates: Tensor, right: Tensor | None = None, *, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Return recall@1, @5, @10, MRR and nDCG@10, means over the queries; zeros without any.

    Args:
        queries: (n, d), on the CPU.
        candidates: (m, d).
        right: int64, (2, p), pairs of a query and a candidate that is right for it: in ascending order, each once, and
            at least one of each query. None: candidate i is right for query i.
        device: where similarities are computed. It holds all candidates, and the queries of a tile.

    Raises:
        ValueError: a query without a right candidate.
    """
    sums = dict.fromkeys((*(f"recall@{k}" for k in KS), "mrr", f"ndcg@{DEPTH}"), 0.0)
    best = (1 / torch.log2(2 + torch.arange(DEPTH, dtype=torch.float64))).cumsum(0)
    for ranks, count in _ranks(queries, candidates, right, device):
        first = ranks[:, 0]
        for k in KS:
            sums[f"recall@{k}"] += (first < k).sum().item()
        sums["mrr"] += (1 / (1 + first)).sum().item()
        gains = torch.where(ranks < DEPTH, 1 / torch.log2(2 + ranks), 0.0).sum(1)
        sums[f"ndcg@{DEPTH}"] += (gains / best[count.clamp(max=DEPTH) - 1]).sum().item()
    return {name: value / max(1, len(queries)) for name, value in sums.items()}


def first_ranks(
    queries: Tensor, candidates: Tensor, right: Tensor | None = None, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Return how many wrong candidates are at least as similar to each query as its best right one, (n,).

    The arguments are those of `search_figures`.
    """
    return torch.cat([ranks[:, 0].long() for ranks, _ in _ranks(queries, candidates, right, device)])


def are_right(right: Tensor, rows: Tensor, candidates: int) -> Tensor:
    """Return which candidates are right for these queries, bool, (number of rows, candidates).

    >>> are_right(torch.tensor([[0, 1, 1], [2, 0, 1]]), torch.tensor([1]), 3)
    tensor([[ True,  True, False]])
    """
    first, after = (torch.searchsorted(right[0], rows, right=side) for side in (False, True))
    count = after - first
    line = torch.repeat_interleave(torch.arange(len(rows)), count)
    place = torch.arange(len(line)) - (count.cumsum(0) - count)[line] + first[line]
    is_right = torch.zeros(len(rows), candidates, dtype=torch.bool)
    is_right[line, right[1][place]] = True
    return is_right


def same_places(count: int) -> Tensor:
    """Return the pairs (i, i), (2, count)."""
    return torch.arange(count).expand(2, count)


def _ranks(
    queries: Tensor, candidates: Tensor, right: Tensor | None, device: torch.device | str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for some queries at a time the ranks, from 0, of their best right candidates, and the number of all.

    Yields:
        (rows, r) float64, in ascending order, infinity where a query has fewer; and (rows,); on the CPU.
    """
    right = same_places(len(queries)) if right is None else right
    candidates = candidates.to(device)
    for rows in torch.arange(len(queries)).split(max(1, _TILE // max(1, len(candidates)))) if len(queries) else ():
        similarity = queries[rows].to(device) @ candidates.T
        mask = are_right(right, rows, len(candidates))
        count = mask.sum(1)
        mask = mask.to(device)
        if not count.all():
            raise ValueError(f"query {rows[count == 0][0]} has no right candidate")
        most = min(DEPTH, int(count.max()))
        best = similarity.masked_fill(~mask, float("-inf")).topk(most, dim=1).values
        wrong = similarity.masked_fill_(mask, float("-inf"))
        before = torch.stack([(~(wrong < best[:, place, None])).sum(1) for place in range(most)], dim=1)
        ranks = (before.cpu() + torch.arange(most)).double()
        ranks[torch.arange(most) >= count[:, None]] = float("inf")
        yield ranks, count
