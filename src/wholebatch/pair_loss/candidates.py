"""Candidates that belong to one row alone: its mined negatives, or the documents that a teacher has scored.

A term over them costs O(b h d). They are a list of pairs, (k,), with the row that each belongs to; reductions are sums
and maxima by that row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .reductions import Count, LogSumExp, Max, Mean, Min, Sum, Term
from .row_data import INDEX, nested
from .similarity import pair_similarities
from .tile_entries import Entries, Values, with_ties


@dataclass(frozen=True)
class OwnRows:
    """The own candidates of the local rows.

    Args:
        features: for each similarity, (k, d), as products take them.
        numbers: data of candidates by name, (k,) each.
        owners: (k,), the local row of each.
        count: the number of local rows.
    """

    features: Mapping[str, Tensor]
    numbers: Mapping[str, Tensor]
    owners: Tensor
    count: int

    def reduce(
        self,
        term: Term,
        kinds: Mapping[str, str],
        x: Mapping[str, Tensor],
        x_numbers: Mapping[str, Tensor],
        parameters: Mapping[str, Any],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the reduction of each local row over its own candidates, (b,).

        Args:
            term: the reduction.
            kinds: of similarities, by name.
            x: features of the local rows, by name.
            x_numbers: their numbers, (b,) each, with their index.
            parameters: by name.
            dtype: of sums.
        """
        s = {
            name: pair_similarities(kind, x[name][self.owners], self.features[name], dtype)[:, None]
            for name, kind in kinds.items()
        }
        none = torch.full_like(self.owners, -1)
        x_entries = nested({name: value[self.owners, None] for name, value in x_numbers.items()})[0]
        y_entries = nested({name: value[:, None] for name, value in {**self.numbers, INDEX: none}.items()})[0]
        entries = Entries(kinds, with_ties(s, x_entries), x_entries, y_entries, parameters)
        return self._reduced(term, entries.values(term, entries.mask(term)), dtype)

    def _reduced(self, term: Term, values: Values, dtype: torch.dtype) -> Tensor:
        if isinstance(term, Count):
            ones = torch.ones(values.shape, dtype=dtype, device=self.owners.device)
            return self._sum(_filled(values, ones, 0.0)[:, 0])
        assert values.value is not None
        value = values.value.to(dtype)
        if isinstance(term, Max | Min):
            sign = 1 if isinstance(term, Max) else -1
            best = self._split_max if term.ties == "split" else self._max
            return sign * best(_filled(values, sign * value, float("-inf"))[:, 0])
        if isinstance(term, LogSumExp):
            return self._logsumexp(_filled(values, value, float("-inf"))[:, 0])
        total = self._sum(_filled(values, value, 0.0)[:, 0])
        if isinstance(term, Sum):
            return total
        assert isinstance(term, Mean)
        if values.log_weight is None:
            count = self._sum(_filled(values, torch.ones_like(value), 0.0)[:, 0])
            return total / count.clamp(min=1)
        log_weight = _filled(values, values.log_weight.to(dtype), float("-inf"))[:, 0]
        top = _finite(self._top(log_weight))
        weight = (log_weight - top[self.owners]).exp()
        whole = self._sum(weight)
        return self._sum(weight * _filled(values, value, 0.0)[:, 0]) / torch.where(whole == 0, 1.0, whole)

    def _sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.count).index_add(0, self.owners, x)

    def _top(self, x: Tensor) -> Tensor:
        """Return the largest number of each row, without a gradient; -inf without any."""
        x = x.detach()
        return x.new_full((self.count,), float("-inf")).scatter_reduce(0, self.owners, x, "amax")

    def _logsumexp(self, x: Tensor) -> Tensor:
        top = _finite(self._top(x))
        return _log(self._sum(_exp(x, top[self.owners])), top)

    def _max(self, x: Tensor) -> Tensor:
        """Return the largest number of each row; its gradient belongs to the first that has it."""
        (equal,) = ((x.detach() == self._top(x)[self.owners]) & ~x.detach().isneginf()).nonzero(as_tuple=True)
        first = torch.full((self.count,), len(x), device=x.device).scatter_reduce(0, self.owners[equal], equal, "amin")
        (some,) = (first < len(x)).nonzero(as_tuple=True)
        return x.new_full((self.count,), float("-inf")).index_put((some,), x[first[some]])

    def _split_max(self, x: Tensor) -> Tensor:
        """Return the largest number of each row; all that have it share its gradient."""
        equal = (x.detach() == self._top(x)[self.owners]) & ~x.detach().isneginf()
        count = self._sum(equal.to(x.dtype))
        mean = self._sum(torch.where(equal, x, 0.0) / count.clamp(min=1)[self.owners])
        return torch.where(count > 0, mean, float("-inf"))


def _filled(values: Values, x: Tensor, value: float) -> Tensor:
    """Return numbers of candidates, and `value` elsewhere, with their gradient."""
    x = x.expand(values.shape)
    return x if values.mask is None else torch.where(values.mask, x, value)


def combined(term: Term, batch: Tensor, own: Tensor) -> Tensor:
    """Return the reduction over the candidates of the batch and the own ones, from both, (b,)."""
    if isinstance(term, Sum | Count):
        return batch + own
    if isinstance(term, Max | Min):
        return torch.where(own > batch, own, batch) if isinstance(term, Max) else torch.where(own < batch, own, batch)
    assert isinstance(term, LogSumExp)
    top = _finite(torch.maximum(batch, own).detach())
    return _log(_exp(batch, top) + _exp(own, top), top)


def _finite(top: Tensor) -> Tensor:
    return torch.where(top.isneginf(), 0.0, top)


def _log(total: Tensor, top: Tensor) -> Tensor:
    """Return log(total) + top, and -inf with gradient 0 where the total is 0."""
    some = total > 0
    return torch.where(some, torch.where(some, total, 1.0).log() + top, float("-inf"))


def _exp(x: Tensor, top: Tensor) -> Tensor:
    """Return exp(x - top), and 0 with gradient 0 where x is -inf."""
    some = ~x.isneginf()
    return torch.where(some, (torch.where(some, x, 0.0) - top).exp(), 0.0)
