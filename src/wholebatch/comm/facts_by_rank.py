"""The facts that every rank sent in a handshake, made when they are asked for: a loss needs few of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from .records import Records, Slot, Statement, all_equal

Facts = dict[str, Any]  # JSON values by name


class FactsByRank(Sequence[Facts]):
    """The facts of rank 0, 1, ..., W - 1.

    Args:
        facts: of each rank, with slots instead of numbers; the same object for ranks with one text.
        records: of all ranks, with these numbers.
        statement: this rank's.
        columns: further facts, by name: one value of each rank.
    """

    def __init__(
        self,
        facts: Sequence[Facts],
        records: Records,
        statement: Statement,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self._facts, self.records, self.statement, self._columns = facts, records, statement, dict(columns or {})
        self._texts = [(of_rank, slice(rank, rank + 1)) for rank, of_rank in enumerate(facts)]
        if all_equal([*map(id, facts)]):  # read together
            self._texts = [(facts[0], slice(0, len(facts)))]

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, rank: Any) -> Any:
        return self._filled[rank]

    def __eq__(self, other: object) -> bool:
        return self._filled == (other._filled if isinstance(other, FactsByRank) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._filled)

    @cached_property
    def _filled(self) -> list[Facts]:
        stated = [of_rank for facts, ranks in self._texts for of_rank in self._column(facts, ranks)]
        return [
            {**of_rank, **{name: column[rank] for name, column in self._columns.items()}}
            for rank, of_rank in enumerate(stated)
        ]

    def plus(self, columns: Mapping[str, Sequence[Any]]) -> FactsByRank:
        """Return these facts and further ones: one value of each rank, by name."""
        return FactsByRank(self._facts, self.records, self.statement, {**self._columns, **columns})

    def column(self, *path: str) -> list[Any]:
        """Return one fact of every rank, rank 0's first; further names lead into a fact that is a mapping."""
        if path[0] in self._columns:
            return [_value_at(value, path[1:]) for value in self._columns[path[0]]]
        return [value for facts, ranks in self._texts for value in self._column(_value_at(facts, path), ranks)]

    def columns_of_mapping(self, name: str) -> dict[str, list[Any]] | None:
        """Return, for each entry of a fact that is a mapping, its value on every rank; None if the names differ."""
        names = [facts[name].keys() for facts, _ in self._texts]
        return {key: self.column(name, key) for key in names[0]} if all_equal(names) else None

    def differing(self, name: str) -> list[Any] | None:
        """Return the values of a fact if they differ between ranks, None for a rank without it; NaN equals NaN."""
        values = self._columns.get(name) or [
            value for facts, ranks in self._texts for value in self._column(facts.get(name), ranks)
        ]
        same = all_equal(values) or all(
            value == values[0] or json.dumps(value) == json.dumps(values[0]) for value in values
        )
        return None if same else [*values]

    def _column(self, fact: Any, ranks: slice) -> list[Any]:
        """Return a fact of ranks with one text, with numbers instead of slots."""
        if isinstance(fact, Slot):
            return [*map(fact.kind, self.records.column(fact.index, ranks))]
        if isinstance(fact, list) and fact:
            return [[*row] for row in zip(*(self._column(item, ranks) for item in fact), strict=True)]
        if isinstance(fact, dict) and fact:
            rows = zip(*(self._column(item, ranks) for item in fact.values()), strict=True)
            return [dict(zip(fact, row, strict=True)) for row in rows]
        return [fact] * (ranks.stop - ranks.start)


def _value_at(facts: Any, path: Sequence[str]) -> Any:
    for name in path:
        facts = facts[name]
    return facts
