r"""The numbers that are kept of each row while tiles come and go, one rule for each reduction, and its derivative.

    reduction     kept                                       dR / df_j
    LogSumExp     m = max f, sum exp(f - m)                  exp(f_j - m) / sum
    Sum           sum f                                      1
    Mean          sum f, number                              1 / number
    Mean, with l  m = max l, sum exp(l - m), sum exp(l-m) f  w_j = exp(l_j - m) / sum;  dR / dl_j = w_j (f_j - R)
    Count         number                                     none
    Max, Min      the best f, its index                      none: `pairs` computes it again from its rows
    the same, with ties split: the best f, how many have it  1 / how many, for each of these

Sums are in float64, and m is a number of the tile's precision, so that f - m is not rounded. The same rules hold for
columns, whose numbers are also combined over the ranks. A kept number is of one of these kinds:

    "max"     the larger one
    "sum"     the sum
    "scaled"  a sum of terms relative to the "max" before it: both are brought to the common maximum, then added
    "index"   that of the larger "max" before it; the lower index if they are equal
    "tied"    that of the larger "max" before it; the sum of both if they are equal
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ..comm import Communicator
from .reductions import Count, LogSumExp, Max, Mean, Min, Sum, Term
from .tile_entries import Values

NOBODY = -1.0  # the index of no entry
_LAST = 2.0**52  # beyond every index

Weights = tuple[Tensor | None, Tensor | None]  # dL / df and dL / dl of each entry


class Rule(ABC):
    """How one reduction is computed tile by tile.

    Attributes:
        kinds: of the kept numbers.
        initial: their values before any entry.
        constants: the number of numbers of a row that the backward pass needs; 0: it has no gradient in tiles.
    """

    kinds: ClassVar[tuple[str, ...]]
    initial: ClassVar[tuple[float, ...]]
    constants: ClassVar[int]

    @abstractmethod
    def update_(self, kept: Tensor, values: Values, dim: int, first: int | Tensor) -> None:
        """Add a tile's entries to the kept numbers of its rows (dim 1) or columns (dim 0), (k, numbers), in place.

        Args:
            kept: of the rows or columns of the tile.
            values: of the tile.
            dim: the dimension over which is reduced.
            first: index of the first entry of that dimension, among all ranks' rows or columns.
        """

    @abstractmethod
    def result(self, kept: Tensor) -> Tensor:
        """Return the reduction, (k,), from complete numbers."""

    def backward(self, kept: Tensor, grad: Tensor) -> Tensor:
        """Return the numbers that `weights` needs of each row, (constants, k), from dL/dR, (k,)."""
        raise NotImplementedError

    def weights(self, values: Values, constants: Sequence[Tensor]) -> Weights:
        """Return dL/df and dL/dl of a tile's entries, from numbers of its rows, (m, 1), or columns, (1, n)."""
        raise NotImplementedError


class _LogSumExp(Rule):
    kinds, initial, constants = ("max", "scaled"), (float("-inf"), 0.0), 2

    def update_(self, kept: Tensor, values: Values, dim: int, first: int | Tensor) -> None:
        assert values.value is not None
        scores = values.filled(values.value, float("-inf"))
        shift = _raised_(kept, scores, dim)
        values = replace(values, mask=None)  # which the scores heed
        kept[:, 1].add_(values.exponentials(scores, shift.unsqueeze(dim)).sum(dim))

    def result(self, kept: Tensor) -> Tensor:
        return kept[:, 0] + kept[:, 1].log()  # of no candidate: -inf

    def backward(self, kept: Tensor, grad: Tensor) -> Tensor:
        return torch.stack([_finite(kept[:, 0]), _quotient(grad, kept[:, 1])])

    def weights(self, values: Values, constants: Sequence[Tensor]) -> Weights:
        assert values.value is not None
        shift, factor = constants
        return values.exponentials(values.value, shift).mul_(factor), None


class _BoundedLogSumExp(_LogSumExp):
    """With a given number instead of the largest score."""

    constants = 1

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def update_(self, kept: Tensor, values: Values, dim: int, first: int | Tensor) -> None:
        assert values.value is not None
        kept[:, 0] = self.bound
        kept[:, 1].add_(values.exponentials(values.value, self.bound).sum(dim))

    def backward(self, kept: Tensor, grad: Tensor) -> Tensor:
        return _quotient(grad, kept[:, 1])[None]

    def weights(self, values: Values, constants: Sequence[Tensor]) -> Weights:
        assert values.value is not None
        return values.exponentials(values.value, self.bound).mul_(constants[0]), None


class _Sum(Rule):
    kinds, initial, constants = ("sum",), (0.0,), 1

    def update_(self, kept: Tensor, values: Values, dim: int, first: int | Tensor) -> None:
        assert values.value is not None
        kept[:, 0].add_(values.filled(values.value, 0.0).sum(dim))

    def result(self, kept: Tensor) -> Tensor:
        return kept[:, 0]

    def backward(self, kept: Tensor, grad: Tensor) -> Tensor:
        return grad[None]

    def weights(self, values: Values, constants: Sequence[Tensor]) -> Weights:
        return values.filled(constants[0], 0.0), None


class _Count(Rule):
    kinds, initial, constants = ("sum",), (0.0,), 0

    def update_(self, kept: Tensor, values: Values, dim: int, first: int | Tensor) -> None:
        kept[:, 0].add_(_number(values, dim))

    def result(self, kept: Tensor) -> Tensor:
        return kept[:, 0]


class _Mean(Rule):
    kinds, initial, constants = ("sum", "sum"), (0.0, 0.0), 1

    def update_(self, kept: Tensor, values: Values, dim: int, first: int | Tensor) -> None:
        assert values.value is not None
        kept[:, 0].add_(values.filled(values.value, 0.0).sum(dim))
        kept[:, 1].add_(_number(values, dim))

    def result(self, kept: Tensor) -> Tensor:
        return _quotient(kept[:, 0], kept[:, 1])

    def backward(self, kept: Tensor, grad: Tensor) -> Tensor:
        return _quotient(grad, kept[:, 1])[None]

    def weights(self, values: Values, constants: Sequence[Tensor]) -> Weights:
        return values.filled(constants[0], 0.0), None


class _WeightedMean(Rule):
    kinds, initial, constants = ("max", "scaled", "scaled"), (float("-inf"), 0.0, 0.0), 3

    def update_(self, kept: Tensor, values: Values, dim: int, first: int | Tensor) -> None:
        assert values.value is not None
        assert values.log_weight is not None
        weights = values.filled(values.log_weight, float("-inf"))
        shift = _raised_(kept, weights, dim)
        weights = replace(values, mask=None).exponentials(weights, shift.unsqueeze(dim))
        kept[:, 1].add_(weights.sum(dim))
        kept[:, 2].add_((weights * values.filled(values.value, 0.0)).sum(dim))

    def result(self, kept: Tensor) -> Tensor:
        return _quotient(kept[:, 2], kept[:, 1])

    def backward(self, kept: Tensor, grad: Tensor) -> Tensor:
        return torch.stack([_finite(kept[:, 0]), _quotient(grad, kept[:, 1]), self.result(kept)])

    def weights(self, values: Values, constants: Sequence[Tensor]) -> Weights:
        assert values.value is not None
        assert values.log_weight is not None
        shift, factor, mean = constants
        weights = values.exponentials(values.log_weight, shift).mul_(factor)
        return weights, weights * (values.filled(values.value, 0.0) - mean)


class _Max(Rule):
    kinds, initial, constants = ("max", "index"), (float("-inf"), NOBODY), 0

    def update_(self, kept: Tensor, values: Values, dim: int, first: int | Tensor) -> None:
        best, index = self.scores(values).max(dim)  # the first of equal ones
        _take_(kept, torch.stack([best.to(kept.dtype), (index + first).to(kept.dtype)], 1))

    def scores(self, values: Values) -> Tensor:
        """Return the numbers of which the largest wins."""
        assert values.value is not None
        return values.filled(values.value, float("-inf"))

    def result(self, kept: Tensor) -> Tensor:
        return torch.where(kept[:, 0].isneginf(), NOBODY, kept[:, 1])


class _Min(_Max):
    def scores(self, values: Values) -> Tensor:
        return _negated(values)


class _SplitMax(_Max):
    """The largest score, and how many entries have it: they share the gradient."""

    kinds, initial, constants = ("max", "tied"), (float("-inf"), 0.0), 2
    sign: ClassVar[int] = 1

    def update_(self, kept: Tensor, values: Values, dim: int, first: int | Tensor) -> None:
        scores = self.scores(values)
        best = scores.amax(dim)
        count = (scores == best.unsqueeze(dim)).sum(dim)
        _tie_(kept, torch.stack([best.to(kept.dtype), count.to(kept.dtype)], 1))

    def result(self, kept: Tensor) -> Tensor:
        return self.sign * kept[:, 0]

    def backward(self, kept: Tensor, grad: Tensor) -> Tensor:
        return torch.stack([kept[:, 0], torch.where(kept[:, 0].isneginf(), 0.0, _quotient(grad, kept[:, 1]))])

    def weights(self, values: Values, constants: Sequence[Tensor]) -> Weights:
        best, share = constants
        return (self.scores(values) == best) * share, None


class _SplitMin(_SplitMax):
    sign: ClassVar[int] = -1

    def scores(self, values: Values) -> Tensor:
        return _negated(values)


def _negated(values: Values) -> Tensor:
    """Return the numbers of which the largest belongs to the smallest score."""
    assert values.value is not None
    return values.filled(-values.value, float("-inf"))


def rule_of(term: Term) -> Rule:
    """Return the rule of a term that tiles compute."""
    if term.ties == "split":
        return _SplitMax() if isinstance(term, Max) else _SplitMin()
    if term.bound is not None:
        return _BoundedLogSumExp(term.bound)
    if isinstance(term, Mean) and term.log_weight is not None:
        return _WeightedMean()
    rules: dict[type[Term], type[Rule]] = {
        LogSumExp: _LogSumExp,
        Sum: _Sum,
        Mean: _Mean,
        Count: _Count,
        Max: _Max,
        Min: _Min,
    }
    return rules[next(filter(rules.__contains__, type(term).__mro__))]()


class Kept:
    """The kept numbers of several reductions side by side: how they start, and how two ranks' parts are combined.

    Args:
        rules: of the reductions.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.kinds = [kind for rule in rules for kind in rule.kinds]
        self.initial = [value for rule in rules for value in rule.initial]
        ends = [sum(len(rule.kinds) for rule in rules[: number + 1]) for number in range(len(rules))]
        self.slices = [slice(end - len(rule.kinds), end) for end, rule in zip(ends, rules, strict=True)]

    def start(self, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the numbers before any entry, (rows, numbers)."""
        return torch.tensor(self.initial, dtype=dtype, device=device).expand(rows, len(self.initial)).clone()

    def combine_(self, x: Tensor, other: Tensor) -> None:
        """Combine the numbers of two parts, in place."""
        pos = 0
        while pos < len(self.kinds):
            if self.kinds[pos] == "sum":
                x[:, pos].add_(other[:, pos])
                pos += 1
                continue
            group = slice(pos, self._end_of_group(pos))
            if self.kinds[pos + 1] == "index":
                _take_(x[:, group], other[:, group])
            elif self.kinds[pos + 1] == "tied":
                _tie_(x[:, group], other[:, group])
            else:
                top = torch.maximum(x[:, pos], other[:, pos])
                for column in range(pos + 1, group.stop):
                    x[:, column] = x[:, column] * _ratio(x[:, pos], top) + other[:, column] * _ratio(other[:, pos], top)
                x[:, pos] = top
            pos = group.stop

    def over_ranks(self, comm: Communicator, x: Tensor) -> Tensor:
        """Return the numbers of all ranks combined. Collective: up to three all-reduces."""
        if comm.size == 1:
            return x
        x = x.clone()
        tops = [pos for pos, kind in enumerate(self.kinds) if kind == "max"]
        if tops:
            top = comm.all_reduce(x[:, tops].contiguous(), "max", check=False)
            lowest = []
            for number, pos in enumerate(tops):
                for column in range(pos + 1, self._end_of_group(pos)):
                    if self.kinds[column] == "scaled":
                        x[:, column].mul_(_ratio(x[:, pos], top[:, number]))
                    elif self.kinds[column] == "tied":
                        x[:, column].mul_(x[:, pos] == top[:, number])
                    else:
                        wins = (x[:, pos] == top[:, number]) & (x[:, column] != NOBODY)
                        x[:, column] = torch.where(wins, x[:, column], _LAST)
                        lowest.append(column)
                x[:, pos] = top[:, number]
            if lowest:
                x[:, lowest] = comm.all_reduce(x[:, lowest].contiguous(), "min", check=False)
        added = [column for column, kind in enumerate(self.kinds) if kind in ("sum", "scaled", "tied")]
        if added:
            x[:, added] = comm.all_reduce(x[:, added].contiguous(), check=False)
        return x

    def _end_of_group(self, pos: int) -> int:
        end = pos + 1
        while end < len(self.kinds) and self.kinds[end] in ("scaled", "index", "tied"):
            end += 1
        return end


def _raised_(kept: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Raise the kept maximum to that of the scores, and bring the scaled sums to it; return it, 0 where it is -inf."""
    top = torch.maximum(kept[:, 0], scores.amax(dim).to(kept.dtype))
    kept[:, 1:].mul_(_ratio(kept[:, 0], top)[:, None])
    kept[:, 0] = top
    return _finite(top)


def _ratio(old: Tensor, new: Tensor) -> Tensor:
    """Return exp(old - new) for old <= new; 0 where both are -inf."""
    return (old - _finite(new)).exp()


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isneginf(), 0.0, x)


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / b)


def _number(values: Values, dim: int) -> Tensor | int:
    """Return the number of candidates of each row or column."""
    return values.shape[dim] if values.mask is None else values.ones.sum(dim)


def _take_(best: Tensor, new: Tensor) -> None:
    """Replace (value, index) by those of a larger value, or of an equal one with a lower index, in place."""
    value, index = new[:, 0], new[:, 1]
    better = (value > best[:, 0]) | ((value == best[:, 0]) & ~value.isneginf() & (index < best[:, 1]))
    best.copy_(torch.where(better[:, None], new, best))


def _tie_(best: Tensor, new: Tensor) -> None:
    """Replace (value, number) by those of a larger value, or add the numbers of equal ones, in place."""
    larger, equal = new[:, 0] > best[:, 0], new[:, 0] == best[:, 0]
    count = best[:, 1] + equal * new[:, 1]
    best.copy_(torch.where(larger[:, None], new, torch.stack([best[:, 0], count], 1)))
