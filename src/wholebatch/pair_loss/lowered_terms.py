"""Terms of a call that the sweeps of the built-in losses compute, as `lowering` says: passes over S, and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from .._base.normalize import UNIT
from .._base.precision import wide_dtype
from ..contract import Facts
from ..nodes import Bounds, Layout, Operands, RowStatistics, Towers, row_statistics
from ..nodes.cross_entropy import how_many_equal
from ..partition import Diagonal
from ..sweep import NONE, Diagonals, EqualIds, Pairs, Selection
from ..sweep.pairs import Entries as EntrySet
from .arguments import Arguments
from .declaration import Declaration
from .failure import Failure
from .lowering import Lowered, Pass, SigmoidPass
from .masks import OTHER, Condition
from .pairs import Tower, as_integers
from .reductions import LogSumExp, Sum, Term
from .row_data import INDEX, PARTNER, Fields
from .sigmoid_sums import sigmoid_sums
from .similarity import ONE
from .tile import Reduced

_FACTOR = "factor of pass"
_TOWERS = Towers(stays=(0,), travels=(1,))


class Call(Protocol):
    """The part of a call that a pass reads: its declaration, the facts of all ranks, and both sides of S."""

    declared: Declaration
    facts: Facts
    x: Tower
    y: Tower  # x itself, where rows are columns
    partners: list[dict[str, Tensor]]  # numbers of rows, and of columns
    parameters: dict[str, Any]
    failure: Failure
    share: Tensor | None  # 0 with the gradient of L by sums that are constants in L

    def slopes(self, name: str, value: Tensor, known: Mapping[str, Tensor], sums: Tensor) -> Tensor:
        """Return the slopes of L, but for its divisor, by the sums from which the term of this name is computed."""


@cache
def names_of_factors(terms: int) -> list[str]:
    """Return the names of the numbers of `factors`, for a declaration with this number of terms."""
    return [f"{_FACTOR} {i}" for i in range(1 + terms)]


@torch.no_grad()
def factors(passes: Lowered | None, names: Sequence[str], call: Arguments, device: torch.device) -> dict[str, Tensor]:
    """Return a of each pass, (), then b of a sigmoid pass, by these names, the same on all ranks; then zeros."""
    values = list[Tensor]()
    for each in () if passes is None else passes.passes:
        a, b = _coefficients(each, call.parameters, device)
        values += [a, b] if isinstance(each, SigmoidPass) and b is not None else [a]
    values += [torch.zeros((), dtype=wide_dtype(device), device=device)] * (len(names) - len(values))
    return dict(zip(names, values, strict=True))


def reduce(
    lowered: Lowered, factors: Sequence[float], call: Call, reduced: Sequence[Reduced]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the terms of this rank's rows and of its columns, by name. Collective: as `row_statistics`, for each pass.

    Args:
        lowered: the terms.
        factors: a of each pass, the same on all ranks; further ones are not used.
        call: the call.
        reduced: the terms that are no partners.
    """
    terms = {each.name: each for each in reduced} | {**lowered.partners}
    ids = _Ids(call)
    sides = _Side(call, ids, rows=True), _Side(call, ids, rows=False)
    values = dict[str, Tensor](), dict[str, Tensor]()
    for name, condition in lowered.counted.items():
        for into, side in zip(values, sides, strict=True):
            if side.reads(terms[name]):
                into[name] = side.count(condition)
    for each, number in zip(lowered.passes, factors, strict=False):
        if isinstance(each, SigmoidPass):
            values[0].update(_softplus_terms(each, (number, factors[1]), call, sides[0], ids, values[0]))
            break
        a, b = _learned(each, call)
        statistics = _statistics(each, (number, a), call, [terms[name] for name in each.terms], sides, ids)
        for into, side, side_statistics in zip(values, sides, statistics, strict=True):
            names = [name for name in each.terms if side.reads(terms[name])]
            if side_statistics is not None and names:
                base = None if b is None else side.base(each.score, b)
                into |= {
                    name: side.value(terms[name].term, side_statistics, each.terms[name], each, base) for name in names
                }
    return values


class _Ids:
    """The integers of rows that masks compare, each of them gathered once."""

    def __init__(self, call: Call) -> None:
        self._facts, self._gathered = call.facts, dict[tuple[int, str], Tensor]()

    def local(self, tower: Tower, name: str) -> Tensor:
        """Return those of this rank's rows, (b,)."""
        return as_integers(tower.numbers[name]).to(torch.int64)

    def everywhere(self, tower: Tower, name: str) -> Tensor:
        """Return those of all ranks' rows, (B,). Collective: one all-gather, the first time."""
        key = id(tower), name
        if key not in self._gathered:
            self._gathered[key] = self._facts.all_gather(self.local(tower, name), tower.rows)
        return self._gathered[key]


class _Side:
    """The rows of one side of a call: of x, or the columns, of y."""

    def __init__(self, call: Call, ids: _Ids, *, rows: bool) -> None:
        self._call, self._ids, self._rows = call, ids, rows
        self._own, self._other = (call.x, call.y) if rows else (call.y, call.x)
        self.reads = attrgetter("rows" if rows else "cols")  # of a reduced term: whether this side reads it
        self._counts = dict[Condition, Tensor]()

    def base(self, score: Term, without_partner: Tensor) -> Tensor:
        """Return b, (rows,) or (), with its graph.

        Args:
            score: the score.
            without_partner: b if partners were 0, ().
        """
        partners = self._call.partners[0 if self._rows else 1]
        if PARTNER not in partners:
            return without_partner
        numbers = {PARTNER: partners[PARTNER].unsqueeze(int(self._rows))}
        zero = without_partner.new_zeros(1, 1)

        def compute() -> Tensor:
            return _value(score, zero, (numbers, {}) if self._rows else ({}, numbers), self._call.parameters)

        return self._call.failure.guard(compute, lambda: zero).flatten()

    def count(self, condition: Condition) -> Tensor:
        """Return the number of pairs of each row, (rows,). Collective where it compares data: one all-gather."""
        if condition not in self._counts:
            self._counts[condition] = self._count(condition).to(wide_dtype(self._call.facts.device))
        return self._counts[condition]

    def _count(self, condition: Condition) -> Tensor:
        total, index = self._other.rows.total, self._own.index(self._call.facts)
        if not condition:
            return torch.full_like(index, total)
        (name, equal), *others = sorted(condition, key=lambda compared: compared.name == INDEX)
        if name == INDEX:
            same = (index < total).to(torch.int64)
        else:
            same = how_many_equal(self._ids.local(self._own, name), self._ids.everywhere(self._other, name))
        return same - len(others) if equal else total - same

    def value(
        self, term: Term, statistics: RowStatistics, pairs: Condition, sweep: Pass, base: Tensor | None
    ) -> Tensor:
        """Return a term, (rows,), from the statistics of a s, and from b; None: b is 0."""
        if isinstance(term, LogSumExp):
            value = statistics.logsumexp if base is None else statistics.logsumexp + base
            return value if self._always(pairs) else torch.where(self.count(pairs) > 0, value, float("-inf"))
        total = statistics.target if pairs == sweep.positive else statistics.logits
        assert total is not None
        return self.total(term, total, pairs, base)

    def total(self, term: Term, total: Tensor, pairs: Condition, base: Tensor | None = None) -> Tensor:
        """Return a Sum or a Mean, (rows,), from the sums of all scores but for b; None: b is 0."""
        if isinstance(term, Sum):
            return total if base is None else total + self.count(pairs) * base
        count = self.count(pairs)
        mean = total / count.clamp(min=1)
        return torch.where(count > 0, mean if base is None else mean + base, 0.0)

    def _always(self, condition: Condition) -> bool:
        """Return whether the numbers of rows alone show that every row has such a pair."""
        return condition <= OTHER and self._other.rows.total > len(condition)


def _softplus_terms(
    sweep: SigmoidPass,
    numbers: tuple[float, float],
    call: Call,
    side: _Side,
    ids: _Ids,
    known: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the term of a sigmoid pass, (b,), by its name. Collective: see `sigmoid_sums`.

    Args:
        sweep: the pass.
        numbers: a and b, the same on all ranks.
        call: the call.
        side: its rows.
        ids: integers of rows.
        known: the terms of rows that are counted.
    """
    facts, kind = call.facts, call.declared.kinds[ONE]
    dtype = facts.features_dtype if kind == "dot" else facts.dtype
    x, y = (tower.features[ONE].to(dtype) for tower in (call.x, call.y))
    facts = facts.with_(features_dtype=dtype).in_units()
    ((name, pairs),) = sweep.terms.items()
    a, b = _learned(sweep, call)
    assert b is not None
    early = sweep.adds_up and facts.differentiable and facts.options.reduction != "none"

    def value(sums: Tensor) -> Tensor:
        return side.total(sweep.score, sums, pairs)

    sums, share = sigmoid_sums(
        facts,
        Layout(call.x.rows, call.y.rows),
        Pairs(NONE, NONE if sweep.excluded is None else _entries(sweep.excluded, call, ids)),
        _scalar(numbers[0], a),
        _scalar(numbers[1], b),
        (x, y),
        (lambda sums: call.slopes(name, value(sums), known, sums)) if early else None,
    )
    call.share = share
    return {name: value(sums)}


def _statistics(
    sweep: Pass,
    factor: tuple[float, Tensor],
    call: Call,
    terms: Sequence[Reduced],
    sides: tuple[_Side, _Side],
    ids: _Ids,
) -> tuple[RowStatistics | None, RowStatistics | None]:
    """Return the statistics of a s for this rank's rows and columns. Collective: as `row_statistics`."""
    facts, alone, kind = call.facts, call.y is call.x, call.declared.kinds[ONE]
    sums = {sweep.terms[each.name] for each in terms if not isinstance(each.term, LogSumExp)}
    wanted = ("sum", *(["target"] if sweep.positive in sums else []))
    if sums - {sweep.positive}:
        wanted = (*wanted, "logits", "count")
    # Kernels multiply rows in half precision as they are, and divide by their norms afterward.
    normalizes = alone and kind == "cosine" and facts.kernels
    narrow = facts.features_dtype != facts.inputs["x"].dtype and (normalizes or kind == "dot")
    layout = facts.once("layout", lambda: Layout(call.x.rows, call.y.rows, symmetric=alone))
    if alone:
        features = [facts.inputs["x"] if normalizes else call.x.features[ONE].to(facts.dtype)]
        towers = Towers(stays=(0,), normalize=normalizes)
    else:
        features = [tower.features[ONE].to(facts.dtype) for tower in (call.x, call.y)]
        towers = _TOWERS
    pairs = Pairs(*[NONE if each is None else _entries(each, call, ids) for each in (sweep.positive, sweep.excluded)])
    bound = UNIT**2 if kind == "cosine" else facts.norms["x"] * facts.norms["x" if alone else "y"]
    reads_rows, reads_cols = [any(map(side.reads, terms)) for side in sides]
    rows, cols = wanted if alone or reads_rows else (), wanted if not alone and reads_cols else ()
    scale, operands = _scalar(*factor), Operands(features, towers, layout, narrow=narrow)
    if sweep.adds_own and wanted == ("sum", "target") and not alone and layout.rows.counts == layout.cols.counts:
        # The way of the built-in losses: a row has the same pair as its column.
        least = facts.min_pair_product if kind == "dot" else None
        pair_bounds = Bounds(bound, min_pair_product=least, add_positive=1.0)
        selection = Selection(pairs, "negatives")
        both = row_statistics(facts, scale, operands, selection, pair_bounds, rows=wanted, cols=cols[:1])
        assert both[0] is not None
        own = both[0].target
        assert own is not None
        without_own = torch.stack([side.logsumexp for side in both if side is not None])
        with_own = iter(torch.logaddexp(without_own, own).unbind())
        x_statistics, y_statistics = [None if side is None else RowStatistics(next(with_own), own) for side in both]
        return x_statistics, y_statistics
    x_statistics, y_statistics = row_statistics(
        facts, scale, operands, Selection(pairs, sweep.over), Bounds(bound), rows=rows, cols=cols
    )
    return x_statistics, x_statistics if alone else y_statistics


def _entries(condition: Condition, call: Call, ids: _Ids) -> EntrySet:
    """Return pairs that are equal in something, as the sweep takes them. Collective where they compare data."""
    itself = call.facts.once("itself", lambda: _itself(call))
    names = [compared.name for compared in condition if compared.name != INDEX]
    if not names:
        return itself
    columns = ids.everywhere(call.y, names[0])
    return EqualIds(ids.local(call.x, names[0]), columns, but=itself if len(condition) > 1 else None)


def _itself(call: Call) -> Diagonals:
    local = call.x.rows.rows(call.facts.rank)
    return Diagonals(Diagonal(0, local.start, max(0, min(local.stop, call.y.rows.total) - local.start)))


def _value(
    score: Term, s: Tensor, sides: tuple[Mapping[str, Any], Mapping[str, Any]], parameters: Mapping[str, Any]
) -> Tensor:
    """Return a score at some similarities, (n, 1), or for all partners of one side, in the precision of sums."""
    wide = {
        name: x.to(s.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in parameters.items()
    }
    if score.score is None:
        return s
    value: Tensor = score.score(s, Fields("x", sides[0]), Fields("y", sides[1]), Fields("p", wide))
    return value


def _coefficients(sweep: Pass, parameters: Mapping[str, Any], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return a and b, (): the score at 1 minus that at 0, and that at 0, where partners are 0; None: b is 0."""
    if sweep.linear:
        s = torch.ones(1, 1, dtype=wide_dtype(device), device=device)
        return _value(sweep.score, s, ({}, {}), parameters).reshape(()), None
    s = torch.arange(2, dtype=wide_dtype(device), device=device).unsqueeze(1)
    numbers = {PARTNER: s.new_zeros(1, 1)}
    at_zero, at_one = _value(sweep.score, s, (numbers, numbers), parameters).reshape(2).unbind()
    return at_one - at_zero, at_zero


def _scalar(number: float, x: Tensor) -> tuple[float, Any]:
    """Return a number, and the tensor of it if that has a gradient, else the number again."""
    return number, x if x.requires_grad else number


def _learned(sweep: Pass, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return a and b with their graphs."""
    device = call.facts.device

    def none() -> tuple[Tensor, Tensor | None]:
        zero = torch.zeros((), dtype=wide_dtype(device), device=device)
        return zero, None if sweep.linear else zero

    return call.failure.guard(lambda: _coefficients(sweep, call.parameters, device), none)
