"""Recall@k: the fraction of queries whose partner is among the k most similar candidates."""

from __future__ import annotations

import torch
from torch import Tensor

KS = (1, 5, 10)


def ranks_of_partner(queries: Tensor, candidates: Tensor) -> Tensor:
    """Return how many other candidates are at least as similar to query i as candidate i, (n,), from (n, d) each.

    Ties count against the query: equal features are not a success.
    """
    better = []
    for start in range(0, len(queries), 1024):
        similarity = queries[start : start + 1024] @ candidates.T
        local = torch.arange(start, start + len(similarity), device=queries.device)
        partner = similarity.gather(1, local[:, None])
        better.append((similarity >= partner).sum(1) - 1)
    return torch.cat(better)


def recall(queries: Tensor, candidates: Tensor) -> dict[str, float]:
    """Return {"recall@k": fraction of queries whose partner is among the k best}; chance is k / n."""
    ranks = ranks_of_partner(queries, candidates)
    return {f"recall@{k}": (ranks < k).double().mean().item() for k in KS}
