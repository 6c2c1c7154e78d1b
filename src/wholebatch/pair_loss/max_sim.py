"""Late interaction of single pairs: partners, and pairs that have won, computed from the tokens of both.

    s_k = sum_t max_u q_kt . d_ku        over query k's tokens t and document k's tokens u

A few pairs at a time are padded to matrices of one size and multiplied; padding never wins. The gradient follows the
winners, the first of equal ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .._base.autograd import once_differentiable
from ..partition import Ragged
from ..sweep.items import numbers_on

_AT_ONCE = 2**18  # products of tokens, or numbers of the tokens themselves


def vectors_of(items: Ragged, index: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the places of the vectors of some items, one item's after the other's, and how many each has."""
    chosen = index.tolist()
    lengths = tuple(items.lengths[k] for k in chosen)
    starts, counts = (numbers_on(numbers, index.device) for numbers in ([items.starts[k] for k in chosen], lengths))
    first, total = starts - counts.cumsum(0) + counts, sum(lengths)
    places = torch.arange(total, device=index.device)
    return places + first.repeat_interleave(counts, output_size=total), lengths


def max_sim_of_pairs(
    queries: Tensor, documents: Tensor, lengths: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype
) -> Tensor:
    """Return the late interaction of each query with the document of the same place, (k,).

    Args:
        queries: (n, d), tokens of k queries.
        documents: (m, d), tokens of k documents.
        lengths: the number of tokens of each query, and of each document.
        dtype: of the result.
    """
    similarities: Tensor = _OfPairs.apply(queries, documents, lengths, dtype)
    return similarities


class _OfPairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        lengths: tuple[tuple[int, ...], tuple[int, ...]],
        dtype: torch.dtype,
    ) -> Tensor:
        winners = torch.empty(len(queries), dtype=torch.int64, device=queries.device)
        count = len(lengths[0])
        counts = numbers_on(lengths[0], queries.device)
        owners = torch.arange(count, device=queries.device).repeat_interleave(counts, output_size=len(queries))
        best = torch.empty(len(queries), dtype=dtype, device=queries.device)
        q_start = d_start = first = 0
        while first < count:
            last, longest = first + 1, (lengths[0][first], lengths[1][first])
            while last < count:
                wider = max(longest[0], lengths[0][last]), max(longest[1], lengths[1][last])
                if (last + 1 - first) * max(wider[0] * wider[1], sum(wider) * queries.shape[1]) > _AT_ONCE:
                    break
                last, longest = last + 1, wider
            q_counts, d_counts = lengths[0][first:last], lengths[1][first:last]
            q, d = (
                queries[q_start : q_start + sum(q_counts)].to(dtype),
                documents[d_start : d_start + sum(d_counts)].to(dtype),
            )
            q_padded, d_padded = (pad_sequence(x.split(n), batch_first=True) for x, n in ((q, q_counts), (d, d_counts)))
            d_lengths, q_lengths = (torch.tensor(n, device=q.device)[:, None] for n in (d_counts, q_counts))
            d_mask = torch.arange(longest[1], device=q.device) < d_lengths
            scores = torch.bmm(q_padded, d_padded.mT).masked_fill_(~d_mask[:, None], float("-inf"))
            largest, place = scores.max(2)
            q_mask = torch.arange(longest[0], device=q.device) < q_lengths
            starts = d_start + d_lengths.cumsum(0) - d_lengths
            best[q_start : q_start + len(q)] = largest[q_mask]
            winners[q_start : q_start + len(q)] = (place + starts)[q_mask]
            first, q_start, d_start = last, q_start + len(q), d_start + len(d)
        ctx.save_for_backward(queries, documents, winners, owners)
        return torch.zeros(count, dtype=dtype, device=queries.device).index_add_(0, owners, best)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        queries, documents, winners, owners = ctx.saved_tensors
        each = grad[owners][:, None]
        query_grad = document_grad = None
        if ctx.needs_input_grad[0]:
            query_grad = (each * documents[winners]).to(queries.dtype)
        if ctx.needs_input_grad[1]:
            document_grad = torch.zeros_like(documents, dtype=each.dtype).index_add_(0, winners, each * queries)
            document_grad = document_grad.to(documents.dtype)
        return query_grad, document_grad, None, None
