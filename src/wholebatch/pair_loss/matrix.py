"""The terms of a declared loss on all of a small S, in plain PyTorch: see `nodes.matrix`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import once_differentiable
from ..nodes.matrix import log_sum_exp_of
from .accumulators import NOBODY
from .reductions import Count, LogSumExp, Max, Mean, Min, Sum, Term
from .tile import Leaves, Reduced
from .tile_entries import Values

_NONE = {LogSumExp: float("-inf"), Max: float("-inf"), Min: float("inf")}  # the score of an entry that is none


def reduced_matrix(
    leaves: Leaves, terms: Sequence[Reduced], *, finite: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the reductions of rows and of columns by name; of a maximum or minimum the index of the winner.

    Args:
        leaves: all of S, and the numbers of its rows and columns.
        terms: to be reduced.
        finite: whether scores and their slopes are finite everywhere, as those of this library are.
    """
    entries, s = leaves.entries(), next(iter(leaves.products.values()))
    written = [x._version for x in leaves.products.values() if not x.is_inference()]
    rows, cols = dict[str, Tensor](), dict[str, Tensor]()
    scores, masks = dict[Any, Values](), dict[Any, Tensor | None]()
    for each in terms:
        term = each.term
        if not finite:
            mask = entries.mask(term)
            values = entries.values(term, mask)
            left_out = _inverted(_candidates(term, mask, values.value))
        else:
            if term.score not in scores:
                scores[term.score] = entries.values(term, None)
            if term.where not in masks:
                masks[term.where] = _inverted(entries.mask(term))
            values, left_out = scores[term.score], masks[term.where]
        for wanted, into, dim in ((each.rows, rows, 1), (each.cols, cols, 0)):
            if wanted:
                into[each.name] = _reduced(term, s, values, left_out, dim)
    if written != [x._version for x in leaves.products.values() if not x.is_inference()]:
        raise RuntimeError(
            "a function of a term has written into s, which all terms share; use s.clamp() for s.clamp_()"
        )
    return rows, cols


class Tied(torch.autograd.Function):
    """Terms as they are; of tensors that none of them depends on, the gradient is 0 and not missing."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors[count:])
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros_like(x) for x in ctx.saved_tensors)
        return None, *grads, *zeros


def _candidates(term: Term, mask: Tensor | None, score: Tensor | None) -> Tensor | None:
    """Return a term's candidates; a user's score may say that an entry is none."""
    if score is None or type(term) not in _NONE:
        return mask
    counts = score.detach() != _NONE[type(term)]
    return counts if mask is None else mask & counts


def _inverted(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else ~mask


def _reduced(term: Term, s: Tensor, values: Values, left_out: Tensor | None, dim: int) -> Tensor:
    """Return one reduction of all rows, dim 1, or of all columns, dim 0."""

    def filled(x: Tensor, other: float) -> Tensor:
        """Return numbers of candidates, and another one elsewhere."""
        return (x.to(s.dtype) if left_out is None else x.to(s.dtype).masked_fill(left_out, other)).expand(s.shape)

    if isinstance(term, Count):
        return filled(s.new_ones(()), 0.0).sum(dim)
    assert values.value is not None
    if isinstance(term, LogSumExp):
        return log_sum_exp_of(values.value.to(s.dtype).expand(s.shape), left_out, dim)
    scores = filled(values.value, _NONE.get(type(term), 0.0))
    if isinstance(term, Sum):
        return scores.sum(dim)
    if isinstance(term, Mean):
        if values.log_weight is None:
            return scores.sum(dim) / filled(s.new_ones(()), 0.0).sum(dim).clamp(min=1)
        weights = filled(values.log_weight, float("-inf"))
        top = weights.detach().amax(dim, keepdim=True)
        weights = (weights - top.masked_fill(top.isneginf(), 0.0)).exp()
        total = weights.sum(dim)
        return (weights * scores).sum(dim) / total.masked_fill(total == 0, 1.0)
    if term.ties == "split":
        return scores.amax(dim) if isinstance(term, Max) else scores.amin(dim)
    best, index = scores.detach().max(dim) if isinstance(term, Max) else scores.detach().min(dim)
    return index.masked_fill_(best == _NONE[type(term)], int(NOBODY))
