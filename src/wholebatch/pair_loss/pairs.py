"""Single pairs, computed from their two rows: partners, and the pairs that a maximum or a minimum has chosen.

A product of matrices rounds a small distance between long rows, and a choice carries no gradient. So the sweep only
tells which pair it is. Its rows are fetched from their ranks, and its similarity and score are computed from them, in
the precision of sums; autograd does the rest.

    partner of row i    the row of y with the same integer `pair`, where both data have it; each value is there once.
                        Rows of y with a negative `pair` are nobody's partner
                        else the row of y with the same index; each rank must have as many of both
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.precision import wide_dtype
from ..contract import Facts
from ..nodes.fetch import fetch_rows
from ..partition import Partition, Ragged
from .max_sim import max_sim_of_pairs, vectors_of
from .reductions import Max, Min, Term
from .row_data import INDEX, PARTNER, SEPARATOR, nested
from .similarity import LATE, ONE, absolute, pair_similarities, rounding
from .tile_entries import Entries, with_ties

PAIR = "pair"
NOBODY: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Tower:
    """The rows of one side on this rank.

    Args:
        features: for each similarity, (b, d), as products take them.
        numbers: data of rows by name, (b,) each.
        rows: the owners of the rows.
        vectors: those that each row of all ranks consists of, in late interaction; then features have a row for each of
            them. None: each row is one.
    """

    features: Mapping[str, Tensor]
    numbers: Mapping[str, Tensor]
    rows: Partition
    vectors: Ragged | None = None

    def index(self, facts: Facts) -> Tensor:
        """Return the indices of this rank's rows among all ranks' rows, (b,)."""
        return indices(facts, self.rows.offsets[facts.rank], self.rows.counts[facts.rank])

    def fetched(self, facts: Facts, index: Tensor) -> Chosen:
        """Return features and numbers of rows of any rank, by their index. Collective: three messages for each."""
        owners, places, lengths = self.rows, index, None
        if self.vectors is not None:
            owners, (places, lengths) = self.vectors.vectors, vectors_of(self.vectors, index)
        features = {name: fetch_rows(facts.comm, x, owners, places) for name, x in self.features.items()}
        numbers = {name: _fetch(facts, x, self.rows, index) for name, x in self.numbers.items()}
        return Chosen(features, {**numbers, INDEX: index}, lengths)

    def chosen(self, facts: Facts, index: Tensor | None) -> Chosen:
        """Return features and numbers of some local rows, or of all."""
        numbers = {**self.numbers, INDEX: self.index(facts)}
        local = None if self.vectors is None else self.vectors.local(facts.rank)
        if index is None:
            return Chosen(dict(self.features), numbers, None if local is None else local.lengths)
        places, lengths = (index, None) if local is None else vectors_of(local, index)
        features = {name: x[places] for name, x in self.features.items()}
        return Chosen(features, {name: x[index] for name, x in numbers.items()}, lengths)


def indices(facts: Facts, first: int, count: int) -> Tensor:
    """Return the integers from `first` on, which calls of a form share, (count,)."""

    def make() -> Tensor:
        with torch.inference_mode(mode=False):  # autograd may save it in a later call
            return torch.arange(first, first + count, device=facts.device)

    return facts.once(("index", first, count), make)


class Chosen(NamedTuple):
    """Some rows of one side: features and numbers by name, and in late interaction how many vectors each row has."""

    features: dict[str, Tensor]
    numbers: dict[str, Tensor]
    lengths: tuple[int, ...] | None


def _fetch(facts: Facts, x: Tensor, rows: Partition, index: Tensor) -> Tensor:
    """Return numbers of rows of any rank; those without a gradient keep their dtype."""
    return fetch_rows(facts.comm, as_integers(x)[:, None], rows, index)[:, 0].to(x.dtype)


def as_integers(x: Tensor) -> Tensor:
    """Return booleans as integers, which every transport can send, and other numbers as they are."""
    return x.to(torch.uint8) if x.dtype == torch.bool else x


@dataclass(frozen=True)
class Pairing:
    """The partners of the local rows, and of the local columns.

    Args:
        row_partners: for each local row, its partner's index among all columns; None: the local row of the same place.
        col_partners: likewise for columns, among all rows; -1 without a partner.
        all_cols: whether every column of every rank has a partner.
    """

    row_partners: Tensor | None = None
    col_partners: Tensor | None = None
    all_cols: bool = True


def pairing(facts: Facts, x: Tower, y: Tower) -> Pairing:
    """Return who is whose partner, or raise on all ranks. Collective with `pair`: two all-gathers of integers.

    Raises:
        ValueError: on every rank, if the numbers of rows differ and there is no `pair`, or if a value of `pair` is not
            exactly once on each side.
    """
    if PAIR not in x.numbers or PAIR not in y.numbers:
        if x.rows.counts != y.rows.counts:
            raise ValueError(
                f"{facts.caller}: partners need as many rows of x as of y on each rank, got {x.rows.counts} and "
                f"{y.rows.counts}; or integers named 'pair' in both x_data and y_data, equal for partners"
            )
        return Pairing()
    x_pair, y_pair = (facts.all_gather(side.numbers[PAIR].to(torch.int64), side.rows) for side in (x, y))
    (x_sorted, x_order), (y_sorted, y_order) = x_pair.sort(), y_pair.sort()
    alone = int((y_pair < 0).sum())  # the first ones of y
    partners = y_sorted[alone:]
    if partners.shape != x_sorted.shape or bool((x_sorted != partners).any()) or _repeated(x_sorted):
        raise ValueError(
            f"{facts.caller}: each value of 'pair' in x_data must be there once, and once in y_data, over all ranks; "
            f"got {len(x_pair.unique())} values in {len(x_pair)} rows of x, and {len(partners.unique())} in "
            f"{len(partners)} rows of y whose pair is not negative"
        )
    to_y = torch.empty_like(x_order).scatter_(0, x_order, y_order[alone:])
    to_x = torch.full_like(y_order, -1).scatter_(0, y_order[alone:], x_order)
    return Pairing(to_y[x.rows.rows(facts.rank)], to_x[y.rows.rows(facts.rank)], all_cols=not alone)


def _repeated(ordered: Tensor) -> bool:
    return bool((ordered[1:] == ordered[:-1]).any())


class Pairs:
    """Pairs of a local row and a row of any rank.

    Args:
        facts: of the call.
        kinds: of similarities, by name.
        local: the side whose rows are here.
        other: the other side.
        index: for each pair, the row among all rows of the other side; None: the local row of the same place.
        places: for each pair, the local row; None: all, in order.
        rows_are_local: whether `local` is x.
    """

    def __init__(
        self,
        facts: Facts,
        kinds: Mapping[str, str],
        local: Tower,
        other: Tower,
        index: Tensor | None,
        *,
        places: Tensor | None = None,
        rows_are_local: bool,
    ) -> None:
        theirs = other.chosen(facts, None) if index is None else other.fetched(facts, index)
        sides = [local.chosen(facts, places), theirs]
        self.x, self.y = sides if rows_are_local else sides[::-1]
        self.kinds, self.dtype = kinds, wide_dtype(facts.device)

    @cached_property
    def similarities(self) -> dict[str, Tensor]:
        """The similarity of each pair, (k,), by name."""
        x, y = self.x.features, self.y.features
        return {name: self._similarity(kind, x[name], y[name]) for name, kind in self.kinds.items()}

    def rounding(self, dtype: torch.dtype, error: float) -> dict[str, Tensor]:
        """Return by how much tiles of a dtype may round these, with an error of their products, by name."""
        x, y = self.x.features, self.y.features
        rows = {name: (kind, *absolute(kind, x[name], y[name])) for name, kind in self.kinds.items()}
        return {name: rounding(self._similarity(*row), row[1].shape[1], dtype, error) for name, row in rows.items()}

    def _similarity(self, kind: str, x: Tensor, y: Tensor) -> Tensor:
        if kind not in LATE:
            return pair_similarities(kind, x, y, self.dtype)
        order = slice(None, None, 1 if LATE[kind] == "columns" else -1)
        (queries, q), (documents, d) = [(x, self.x.lengths), (y, self.y.lengths)][order]
        assert q is not None
        assert d is not None
        return max_sim_of_pairs(queries, documents, (q, d), self.dtype)

    def scores(self, term: Term, parameters: Mapping[str, Any], partners: Mapping[str, Tensor] = NOBODY) -> Tensor:
        """Return the score of each pair, (k,).

        Args:
            term: the reduction.
            parameters: by name.
            partners: of pairs of partners, the numbers that both sides have beside their data.
        """
        s = {name: x[:, None] for name, x in self.similarities.items()}
        x, y = (
            nested({name: value[:, None] for name, value in {**side, **partners}.items()})[0]
            for side in (self.x.numbers, self.y.numbers)
        )
        value = Entries(self.kinds, with_ties(s, x, y), x, y, parameters).values(term, None).value
        assert value is not None
        return value.to(self.dtype).expand(len(next(iter(s.values()))), 1)[:, 0]


def partner_numbers(numbers: Mapping[str, Tensor], prefix: str = PARTNER) -> dict[str, Tensor]:
    """Return the similarities with partners, or other numbers that belong to these, as numbers of rows, by name."""
    return {prefix if name == ONE else f"{prefix}{SEPARATOR}{name}": x for name, x in numbers.items()}


def winners(
    facts: Facts,
    kinds: Mapping[str, str],
    towers: tuple[Tower, Tower],
    term: Term,
    index: Tensor,
    parameters: Mapping[str, Any],
    *,
    rows_are_local: bool,
) -> Tensor:
    """Return the scores of the pairs that have won, (b,), and without candidates -inf, or inf for a minimum.

    Args:
        facts: of the call.
        kinds: of similarities, by name.
        towers: the local side, and the other one.
        term: the maximum or minimum.
        index: (b,), of the winner among all rows of the other side; negative without one.
        parameters: by name.
        rows_are_local: whether the local side is x.
    """
    assert isinstance(term, Max | Min)
    won = index >= 0
    (places,) = won.nonzero(as_tuple=True)
    local, other = towers
    chosen = Pairs(facts, kinds, local, other, index[places].long(), places=places, rows_are_local=rows_are_local)
    none = float("-inf") if isinstance(term, Max) else float("inf")
    scores = chosen.scores(term, parameters)
    return torch.full_like(index, none, dtype=scores.dtype).index_put((places,), scores)
