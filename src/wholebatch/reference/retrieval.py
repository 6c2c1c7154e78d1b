"""Losses of queries and keys: key i is the positive of query i, and there may be more keys than queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._shared import NO_ID, check_shapes, cross_entropy, normalized, reduce, retrieval_ids, with_equal
from .two_towers import clip_loss


def info_nce_loss(
    queries: Tensor,
    keys: Tensor,
    *,
    logit_scale: Tensor | float,
    negatives: Tensor | None = None,
    hard_negatives: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    hard_negative_ids: Tensor | None = None,
    equal_ids: str = "excluded",
    directions: Sequence[str] = ("query_to_key",),
    partition: str = "joint",
    margin: float = 0.0,
    hardness: float = 0.0,
    hard_negative_hardness: float | None = None,
    exclude_above: float | None = None,
    exclude_relative: bool = False,
    exclude_directions: Sequence[str] | None = None,
    query_guides: Tensor | None = None,
    key_guides: Tensor | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return each query's cross-entropy over all keys (van den Oord et al., 2018, arXiv:1807.03748, equation 4).

    S = logit_scale * Q [K; N]^T,    L = CE(S, i)

    >>> q = torch.eye(3, dtype=torch.float64)
    >>> round(info_nce_loss(q, q, logit_scale=10.0, negatives=-q).item(), 9)
    0.000181585
    """
    check_shapes(
        "info_nce_loss", {"queries": queries, "keys": keys, "negatives": negatives}, query_ids, weights, paired=False
    )
    if len(keys) < len(queries):
        raise ValueError(
            f"info_nce_loss: keys must have at least as many rows as queries, {len(queries)}, got {len(keys)}"
        )
    n, index = len(queries), torch.arange(len(queries), device=queries.device)
    all_keys = keys if negatives is None else torch.cat([keys, negatives])
    q_ids, k_ids = retrieval_ids(query_ids, key_ids, index, len(keys))
    if negatives is not None:
        k_ids = torch.cat([k_ids, k_ids.new_full((len(negatives),), NO_ID)])
    if negative_ids is not None:
        k_ids[len(keys) :] = negative_ids
    guides = (queries, all_keys) if query_guides is None or key_guides is None else (query_guides, key_guides)
    matched = (guides[0] * guides[1][:n]).sum(1, keepdim=True).detach()
    towers = {
        "query_to_key": (queries, all_keys, q_ids, k_ids, guides[0], guides[1]),
        "key_to_query": (keys[:n], queries, k_ids[:n], q_ids, guides[1][:n], guides[0]),
        "query_to_query": (queries, queries, q_ids, q_ids, guides[0], guides[0]),
        "key_to_key": (keys[:n], all_keys, k_ids[:n], k_ids, guides[1][:n], guides[1]),
    }
    blocks: list[Any] = []
    for name in directions:
        x, y, x_ids, y_ids, x_guide, y_guide = towers[name]
        similarities = x @ y.T
        diagonal = torch.zeros_like(similarities, dtype=torch.bool)
        diagonal[index, index] = True
        equal = (x_ids[:, None] == y_ids) & (x_ids[:, None] != NO_ID) & ~diagonal
        positive, excluded = with_equal(diagonal, equal, equal_ids)
        if name in ("query_to_query", "key_to_key"):
            # A row's product with itself is replaced by its pair's, or left out.
            similarities = torch.where(diagonal, (queries * keys[:n]).sum(1, keepdim=True), similarities)
            if partition == "joint":
                positive, excluded = positive & ~diagonal, excluded | diagonal
        above = exclude_above if exclude_directions is None or name in exclude_directions else None
        if above is not None:
            largest = matched + above * (matched.abs() if exclude_relative else 1)
            excluded = excluded | ((x_guide @ y_guide.T > largest) & ~positive)
        logits = logit_scale * (similarities - margin * positive.to(similarities))
        if name == "query_to_key":
            logits = logits + hardness * (similarities * ~positive).detach()
            if hard_negatives is not None:
                extra = torch.einsum("bd,bhd->bh", queries, hard_negatives)
                left_out = torch.zeros_like(extra, dtype=torch.bool)
                if above is not None and query_guides is None:
                    left_out = extra > largest
                if hard_negative_ids is not None:
                    left_out = left_out | (hard_negative_ids == q_ids[:, None])
                extra_hardness = hardness if hard_negative_hardness is None else hard_negative_hardness
                logits = torch.cat([logits, logit_scale * extra + extra_hardness * extra.detach()], 1)
                positive, excluded = torch.cat([positive, left_out & ~left_out], 1), torch.cat([excluded, left_out], 1)
        blocks.append((logits, positive, excluded))
    if partition == "joint":
        blocks = [tuple(torch.cat(parts, 1) for parts in zip(*blocks, strict=True))]
    losses = [cross_entropy(logits, positive, excluded, label_smoothing) for logits, positive, excluded in blocks]
    return reduce(torch.stack(losses).mean(0), weights, reduction)


def moco_loss(
    queries: Tensor,
    keys: Tensor,
    queue: Tensor,
    *,
    logit_scale: Tensor | float,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return each query's cross-entropy over its key and a queue (He et al., 2020, arXiv:1911.05722, equation 1).

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(moco_loss(x, x, -x, logit_scale=10.0).item(), 9)
    9.0798e-05
    """
    check_shapes("moco_loss", {"queries": queries, "keys": keys}, weights)
    check_shapes("moco_loss", {"queries": queries, "queue": queue}, paired=False)
    logits = logit_scale * torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1)
    positive = torch.zeros_like(logits, dtype=torch.bool)
    positive[:, 0] = True
    return reduce(cross_entropy(logits, positive, positive & ~positive), weights, reduction)


def matryoshka_loss(
    queries: Tensor,
    keys: Tensor,
    *,
    logit_scale: Tensor | float,
    dims: Sequence[int],
    dim_weights: Sequence[float] | None = None,
    symmetric: bool = True,
    normalize: bool = True,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return a contrastive loss of leading parts of features (Kusupati et al., 2022, arXiv:2205.13147, equation 1).

    L = sum_l w_l CE(scale n(Q[:, :m_l]) n(K[:, :m_l])^T),    CE: that of CLIP, or of InfoNCE where not symmetric

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(matryoshka_loss(x, x, logit_scale=10.0, dims=(1, 3)).item(), 9)
    0.732529253
    """
    check_shapes("matryoshka_loss", {"queries": queries, "keys": keys}, ids, weights)
    loss: Tensor | float = 0.0
    for m, weight in zip(dims, dim_weights or [1.0] * len(dims), strict=True):
        x, y = (normalized(z[:, :m]) if normalize else z[:, :m] for z in (queries, keys))
        if symmetric:
            part = clip_loss(x, y, logit_scale, ids=ids, equal_ids="excluded", weights=weights, reduction=reduction)
        else:
            part = info_nce_loss(x, y, logit_scale=logit_scale, key_ids=ids, weights=weights, reduction=reduction)
        loss = loss + weight * part
    assert isinstance(loss, Tensor)
    return loss
