"""Late interaction: a query and a document are several vectors each, and every query vector takes its best match.

s_ij = sum_t max_u q_it . d_ju,    S_ij = logit_scale s_ij, or logit_scale s_ij / n_i over query i's n_i tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ._shared import NO_ID, cross_entropy, reduce, retrieval_ids, with_equal


def max_sim(
    queries: Tensor,
    documents: Tensor,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_offsets: Tensor | None = None,
    document_offsets: Tensor | None = None,
    token_reduction: str = "sum",
) -> Tensor:
    """Return s_ij of all queries and documents, (b, c), from one tensor of all token scores, (b, c, t, u).

    Of equal scores the first token has the gradient, as in `torch.max`. Over no tokens a maximum is -inf.

    >>> max_sim(torch.eye(2)[None], torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))
    tensor([[1., 1.]])
    """
    q, q_mask = _padded(queries, query_mask, query_offsets)
    d, d_mask = _padded(documents, document_mask, document_offsets)
    scores = torch.einsum("btd,cud->bctu", q, d).masked_fill(~d_mask[None, :, None], -torch.inf)
    best = torch.where(q_mask[:, None], scores.max(3).values, 0.0).sum(2)
    return best if token_reduction == "sum" else best / q_mask.sum(1, keepdim=True)


def max_sim_loss(
    queries: Tensor,
    documents: Tensor,
    *,
    logit_scale: Tensor | float,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_offsets: Tensor | None = None,
    document_offsets: Tensor | None = None,
    documents_per_query: Tensor | int | None = None,
    share_hard_negatives: bool = True,
    query_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    equal_ids: str = "excluded",
    directions: Sequence[str] = ("query_to_document",),
    token_reduction: str = "sum",
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return each query's cross-entropy over all documents (Khattab and Zaharia, 2020, arXiv:2004.12832, section 3.3).

    S_ij = logit_scale * sum_t max_u q_it . d_ju,    L = CE(S, i)

    >>> q = torch.eye(3, dtype=torch.float64)[:, None]  # one token each: InfoNCE
    >>> round(max_sim_loss(q, q, logit_scale=10.0).item(), 9)
    9.0796e-05
    """
    s = max_sim(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        query_offsets=query_offsets,
        document_offsets=document_offsets,
        token_reduction=token_reduction,
    )
    b, c = s.shape
    rows = torch.arange(b, device=s.device)
    counts = torch.as_tensor(1 if documents_per_query is None else documents_per_query, device=s.device).expand(b)
    first = counts.cumsum(0) - counts  # each query's positive
    query_of = rows.repeat_interleave(counts)
    query_of = torch.cat([query_of, query_of.new_full((c - len(query_of),), -1)])
    positive = first[:, None] == torch.arange(c, device=s.device)
    q_ids, d_ids = retrieval_ids(query_ids, document_ids, first, c)
    equal = (q_ids[:, None] == d_ids) & (q_ids[:, None] != NO_ID) & ~positive
    if not share_hard_negatives:
        others = (query_of >= 0) & ~positive.any(0) & (query_of != rows[:, None])
    else:
        others = torch.zeros_like(positive)
    logits, losses = logit_scale * s, []
    if "query_to_document" in directions:
        positives, excluded = with_equal(positive, equal, equal_ids)
        losses.append(cross_entropy(logits, positives, excluded | others & ~positives, label_smoothing))
    if "document_to_query" in directions:
        positive, equal = positive[:, first].T, equal[:, first].T
        positives, excluded = with_equal(positive, equal, equal_ids)
        losses.append(cross_entropy(logits[:, first].T, positives, excluded, label_smoothing))
    return reduce(torch.stack(losses).mean(0), weights, reduction)


def _padded(x: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return tokens as (items, longest, d), and where there is one."""
    if offsets is None:
        return x, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    lengths = offsets.diff()
    padded = pad_sequence(x.split(lengths.tolist()), batch_first=True)
    return padded, torch.arange(padded.shape[1], device=x.device) < lengths.to(x.device)[:, None]
