"""The figures of a search in a random order, of queries with any number of right candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from .retrieval import DEPTH, KS


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
