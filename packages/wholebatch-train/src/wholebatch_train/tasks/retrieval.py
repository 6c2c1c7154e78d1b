"""Figures of a search: recall@k, the mean reciprocal rank (MRR) and nDCG@10, in tiles, over any number of candidates.

    rank of a right candidate = 1 + the right ones before it + the wrong ones that are at least as similar
    recall@k = fraction of queries with a right candidate among the k best, as in the evaluation of retrieval on COCO
    MRR = mean of 1 / rank of the first right one
    nDCG@10 = sum over right ones of rank <= 10 of 1 / log2(1 + rank), divided by the same sum of the best order

Ties count against the query, and so do features that are not numbers: equal features are no success. nDCG: Järvelin
and Kekäläinen, 2002, ACM TOIS 20(4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.pairs.answers import Stated, other_items
from ..data.pairs.pairs import Pairs

KS = (1, 5, 10)
DEPTH = 10
"""Of nDCG."""
_TILE = 2**24  # similarities that are held at a time
PLURAL = {"image": "images", "text": "texts", "query": "queries", "document": "documents"}
SHOWN = {"mrr": "MRR", "ndcg@10": "nDCG@10"}
"""Titles of figures, where they are not their keys."""
_MOST_DOCUMENTS = 200_000  # that a test searches


def figures(
    queries: Tensor, candidates: Tensor, right: Tensor | None = None, *, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Return recall@1, @5, @10, MRR and nDCG@10, means over the queries.

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
    return {name: value / len(queries) for name, value in sums.items()}


def recall(
    queries: Tensor, candidates: Tensor, right: Tensor | None = None, *, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Return recall@1, @5 and @10 as `figures` does."""
    means = figures(queries, candidates, right, device=device)
    return {name: value for name, value in means.items() if name.startswith("recall")}


def first_ranks(
    queries: Tensor, candidates: Tensor, right: Tensor | None = None, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Return how many wrong candidates are at least as similar to each query as its best right one, (n,).

    The arguments are those of `figures`.
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
    for rows in torch.arange(len(queries)).split(max(1, _TILE // max(1, len(candidates)))):
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
    figures = dict.fromkeys((*(f"recall@{k}" for k in KS), "mrr", f"ndcg@{DEPTH}"), 0.0)
    ranks = torch.arange(1, candidates + 1, dtype=torch.float64)
    gains = 1 / torch.log2(1 + ranks[:DEPTH])
    for m, weight in zip(numbers.tolist(), weights.tolist(), strict=True):
        # later[k] = P(the first right one has a rank above k), the product of (n - m - i) / (n - i) over i < k
        later = ((candidates - m - ranks + 1).clamp(min=0) / (candidates - ranks + 1)).cumprod(0)
        for k in KS:
            figures[f"recall@{k}"] += weight * (1 - later[min(k, candidates) - 1].item())
        first = torch.cat([later.new_ones(1), later[:-1]]) - later
        figures["mrr"] += weight * (first / ranks).sum().item()
        figures[f"ndcg@{DEPTH}"] += weight * (m / candidates * gains.sum() / gains[:m].sum()).item()
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
