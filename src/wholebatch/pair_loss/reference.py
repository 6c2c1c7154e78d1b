"""A declared loss on one dense matrix of all pairs: one process, no tiles, derivatives by autograd.

It shares with the sweep what the user reads (fields, masks, safe values), and computes everything else by itself: the
whole matrix at once, and each row's reduction by the function of torch that has its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .declaration import Declaration
from .function_checks import losses_and_weights
from .reductions import Count, LogSumExp, Max, Mean, Min, Partner, Sum, Term
from .row_data import INDEX, PARTNER, ROUNDING, Fields, changed
from .similarity import ONE, absolute, rounding
from .tile_entries import Entries, with_ties

Features = Mapping[str, Tensor]  # of each similarity, (rows, d)
Numbers = Mapping[str, Any]  # of rows, (rows,), or Fields of such


class OwnCandidates(NamedTuple):
    """Own candidates of all rows: features, numbers, and the row of each, (k,)."""

    features: Features
    numbers: Numbers
    owners: Tensor


@dataclass(frozen=True)
class Dense:
    """The matrix of all pairs.

    Args:
        declaration: of the loss, after its first use.
        x, y: features of rows and of columns; in late interaction of all vectors of a row, one after the other.
        x_data, y_data: their numbers, as the caller passed them.
        own: own candidates, or None.
        parameters: by name.
    """

    declaration: Declaration
    x: Features
    y: Features
    x_data: Mapping[str, Tensor]
    y_data: Mapping[str, Tensor]
    own: OwnCandidates | None
    parameters: Mapping[str, Any]
    lengths: tuple[Sequence[int], Sequence[int]] | None = None  # of rows and columns, in late interaction

    def loss(self, weights: Tensor | None, reduction: str) -> Tensor:
        """Return L of these rows, as if they were the whole batch."""
        declared, kinds = self.declaration, self.declaration.kinds
        s = {name: self._similarities(kind, self.x[name], self.y[name]) for name, kind in kinds.items()}
        rows, cols = next(iter(s.values())).shape
        to_y = self._partners_of_rows(rows, cols)
        x_numbers, y_numbers = self._numbers(to_y, rows, cols)
        x_entries, y_entries = _unsqueezed(x_numbers, 1), _unsqueezed(y_numbers, 0)
        entries = Entries(kinds, with_ties(s, x_entries, y_entries), x_entries, y_entries, self.parameters)
        sides = []
        if declared.row_loss is not None:
            r = {name: self._term(name, entries, x_numbers, to_y) for name in declared.reads.rows}
            returned = declared.row_loss(Fields("r", r), Fields("x", x_numbers), Fields("p", self.parameters))
            sides.append(losses_and_weights("row_loss", returned, rows))
        if declared.column_loss is not None:
            r = {name: self._term(name, entries, None, to_y) for name in declared.reads.cols}
            returned = declared.column_loss(Fields("r", r), Fields("y", y_numbers), Fields("p", self.parameters))
            sides.append(losses_and_weights("column_loss", returned, cols))
        return _combined(sides, weights, reduction)

    def _similarities(self, kind: str, x: Tensor, y: Tensor) -> Tensor:
        """Return the similarity of each row of x with each row of y."""
        if self.lengths is not None:
            x_items, y_items = (tokens.split([*lengths]) for tokens, lengths in zip((x, y), self.lengths, strict=True))
            return torch.stack([torch.stack([(q @ d.T).max(1).values.sum() for d in y_items]) for q in x_items])
        if kind == "neg_squared_distance":
            return -(x[:, None] - y).square().sum(2)
        if kind == "cosine":
            x, y = normalize(x, dim=1), normalize(y, dim=1)
        return x @ y.T

    def _partners_of_rows(self, rows: int, cols: int) -> Tensor | None:
        """Return the column of each row's partner."""
        if "pair" in self.x_data and "pair" in self.y_data:
            return (self.x_data["pair"][:, None] == self.y_data["pair"]).long().argmax(1)
        device = next(iter(self.x.values())).device
        return torch.arange(rows, device=device) if rows == cols else None

    def _numbers(self, to_y: Tensor | None, rows: int, cols: int) -> tuple[Numbers, Numbers]:
        """Return what functions read of rows and of columns."""
        device = next(iter(self.x.values())).device
        x: dict[str, Any] = {**self.x_data, INDEX: torch.arange(rows, device=device)}
        y: dict[str, Any] = {**self.y_data, INDEX: torch.arange(cols, device=device)}
        if to_y is not None:
            for key in (PARTNER, ROUNDING):
                s = {name: self._partners(key, kind, name, to_y) for name, kind in self.declaration.kinds.items()}
                none = torch.zeros(cols, dtype=next(iter(s.values())).dtype, device=device)
                back = {name: none.index_put((to_y,), values) for name, values in s.items()}
                x[key], y[key] = (by_name.get(ONE, Fields("s", by_name)) for by_name in (s, back))
        return x, y

    def _partners(self, key: str, kind: str, name: str, to_y: Tensor) -> Tensor:
        """Return the similarity of each row of x with its partner, or its rounding."""
        x, y = self.x[name], self.y[name]
        if key == ROUNDING:
            x, y = absolute(kind, x, y)
        if self.lengths is not None:
            s = self._similarities(kind, x, y)[torch.arange(len(to_y), device=to_y.device), to_y]
        else:
            s = _pair_similarities(kind, x, y[to_y])
        return s if key == PARTNER else rounding(s, x.shape[1], x.dtype)

    def _term(self, name: str, entries: Entries, x_numbers: Numbers | None, to_y: Tensor | None) -> Tensor:
        """Return one reduction of all rows, or of all columns, without `x_numbers`."""
        term = self.declaration.terms[name]
        if isinstance(term, Partner):
            assert to_y is not None
            value = entries.values(term, None).value
            assert value is not None
            scores = value.expand(entries.shape)[torch.arange(len(to_y), device=to_y.device), to_y]
            return scores if x_numbers is not None else torch.zeros_like(scores).index_put((to_y,), scores)
        groups = [list[_Candidates]() for _ in range(entries.shape[0 if x_numbers is not None else 1])]
        if term.over != "own":
            whole = _Candidates.of(entries, term)
            for group, candidates in zip(groups, whole.split(0 if x_numbers is not None else 1), strict=True):
                group.append(candidates)
        if term.over != "batch":
            assert x_numbers is not None
            for row, group in enumerate(groups):
                group += _Candidates.of(self._own_entries(row, x_numbers), term).split(0)
        reduced = [
            _reduced(term, _Candidates(*(torch.cat(parts) for parts in zip(*group, strict=True)))) for group in groups
        ]
        return torch.stack(reduced) if reduced else next(iter(entries.s.values())).sum(1)[:0]

    def _own_entries(self, row: int, x_numbers: Numbers) -> Entries:
        """Return one row's own candidates as a matrix of one row."""
        assert self.own is not None
        mask = self.own.owners == row
        s = {
            name: _pair_similarities(kind, self.x[name][row : row + 1], self.own.features[name][mask])[None]
            for name, kind in self.declaration.kinds.items()
        }
        row_numbers = changed(x_numbers, lambda x: x[row : row + 1])
        numbers = {name: x[mask] for name, x in self.own.numbers.items()}
        columns = {**numbers, INDEX: torch.full_like(self.own.owners[mask], -1)}
        return Entries(self.declaration.kinds, s, _unsqueezed(row_numbers, 1), _unsqueezed(columns, 0), self.parameters)


class _Candidates(NamedTuple):
    """Masks, scores and log weights of some pairs, all of one shape."""

    mask: Tensor
    value: Tensor
    log_weight: Tensor

    @classmethod
    def of(cls, entries: Entries, term: Term) -> _Candidates:
        like = next(iter(entries.s.values()))
        mask = entries.mask(term)
        values = entries.values(term, mask)
        candidates = torch.ones_like(like, dtype=torch.bool) if mask is None else mask
        numbers = (torch.zeros_like(like) if x is None else x for x in (values.value, values.log_weight))
        return cls(*(x.expand(entries.shape) for x in (candidates, *numbers)))

    def split(self, dim: int) -> list[_Candidates]:
        """Return those of each row, or of each column."""
        # The gradients of indexed rows would each be as large as the matrix.
        return [_Candidates(*group) for group in zip(*(x.unbind(dim) for x in self), strict=True)]


def _reduced(term: Term, all_pairs: _Candidates) -> Tensor:
    """Return the reduction of one row over its candidates."""
    value, log_weight = all_pairs.value[all_pairs.mask], all_pairs.log_weight[all_pairs.mask]
    if isinstance(term, LogSumExp):
        value = value[~value.isneginf()]
        return value.logsumexp(0) if len(value) else value.new_full((), float("-inf"))
    if isinstance(term, Max | Min):
        none = float("-inf") if isinstance(term, Max) else float("inf")
        value = value[value != none]
        if not len(value):
            return value.new_full((), none)
        if term.ties == "split":
            return value.amax() if isinstance(term, Max) else value.amin()
        return value[value.argmax() if isinstance(term, Max) else value.argmin()]
    if isinstance(term, Count):
        return value.new_full((), len(value))
    if isinstance(term, Sum):
        return value.sum()
    assert isinstance(term, Mean)
    if term.log_weight is not None:
        counted = ~log_weight.isneginf()
        value, log_weight = value[counted], log_weight[counted]
    if not len(value):
        return value.new_zeros(())
    return value.mean() if term.log_weight is None else (log_weight.softmax(0) * value).sum()


def _pair_similarities(kind: str, x: Tensor, y: Tensor) -> Tensor:
    if kind == "neg_squared_distance":
        return -(x - y).square().sum(1)
    if kind == "cosine":
        x, y = normalize(x, dim=1), normalize(y, dim=1)
    return (x * y).sum(1)


def _unsqueezed(numbers: Numbers, dim: int) -> dict[str, Any]:
    """Return numbers of rows as (m, 1), dim 1, or of columns as (1, n), dim 0."""
    return changed(numbers, lambda x: x.unsqueeze(dim))


def _combined(sides: list[list[Tensor]], weights: Tensor | None, reduction: str) -> Tensor:
    """Return the weighted losses of rows and columns, added up as `reduction` asks."""
    weighted = []
    for loss, *own in sides:
        each = torch.ones_like(loss) if weights is None else weights.to(loss)
        for factor in own:
            each = each * factor
        loss = loss.masked_fill((each == 0) & ~loss.isfinite(), 0.0)  # such a row does not count
        weighted.append((each * loss, each))
    if reduction == "none":
        parts = [loss for loss, _ in weighted]
    elif reduction == "sum":
        parts = [loss.sum() for loss, _ in weighted]
    else:
        parts = [loss.sum() / each.sum() if each.sum() > 0 else (loss * 0).sum() for loss, each in weighted]
    return sum(parts[1:], start=parts[0])
