"""The facts that every rank sent in a handshake, made when they are asked for: a loss needs few of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from .records import Records, Slot, all_equal, fill

Facts = dict[str, Any]  # JSON values by name


class FactsByRank(Sequence[Facts]):
    """The facts of rank 0, 1, ..., W - 1.

    Args:
        facts: of each rank, with slots instead of numbers; the same object for ranks with one text.
        records: of all ranks, with these numbers; None: there are no slots.
        columns: further facts, by name: one value of each rank.
    """

    def __init__(
        self,
        facts: Sequence[Facts],
        records: Records | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self._facts, self.records, self._columns = facts, records, dict(columns or {})
        self._alike = all_equal([*map(id, facts)])

    def __len__(self) -> int:
        return len(self._facts)

    @overload
    def __getitem__(self, rank: int) -> Facts: ...

    @overload
    def __getitem__(self, rank: slice) -> list[Facts]: ...

    def __getitem__(self, rank: int | slice) -> Facts | list[Facts]:
        return self._filled[rank]

    def __eq__(self, other: object) -> bool:
        return self._filled == (other._filled if isinstance(other, FactsByRank) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._filled)

    @cached_property
    def _filled(self) -> list[Facts]:
        numbers = self.records.numbers if self.records is not None else lambda _: []
        return [
            {**fill(of_rank, numbers(rank)), **{name: column[rank] for name, column in self._columns.items()}}
            for rank, of_rank in enumerate(self._facts)
        ]

    def plus(self, columns: Mapping[str, Sequence[Any]]) -> FactsByRank:
        """Return these facts and further ones: one value of each rank, by name."""
        return FactsByRank(self._facts, self.records, {**self._columns, **columns})

    def column(self, *path: str) -> list[Any]:
        """Return one fact of every rank, rank 0's first; further names lead into a fact that is a mapping."""
        if path[0] in self._columns:
            return [_value_at(value, path[1:]) for value in self._columns[path[0]]]
        if not self._alike:
            return [_value_at(of_rank, path) for of_rank in self._filled]
        return self._column(_value_at(self._facts[0], path))

    def columns_of_mapping(self, name: str) -> dict[str, list[Any]] | None:
        """Return, for each entry of a fact that is a mapping, its value on every rank; None if the names differ."""
        if self._alike:
            return {key: self._column(value) for key, value in self._facts[0][name].items()}
        of_ranks = [of_rank[name] for of_rank in self._filled]
        if any(of_rank.keys() != of_ranks[0].keys() for of_rank in of_ranks):
            return None
        return {key: [of_rank[key] for of_rank in of_ranks] for key in of_ranks[0]}

    def differing(self, name: str) -> list[Any] | None:
        """Return the values of a fact if they differ between ranks, None for a rank without it; NaN equals NaN."""
        if self._alike and name not in self._columns and not _has_slots(self._facts[0].get(name)):
            return None
        values = self.column(name) if self._alike else [of_rank.get(name) for of_rank in self._filled]
        same = all_equal(values) or all(
            value == values[0] or json.dumps(value) == json.dumps(values[0]) for value in values
        )
        return None if same else values

    def _column(self, fact: Any) -> list[Any]:
        if isinstance(fact, Slot) and self.records is not None:
            return fact.column(self.records)
        if isinstance(fact, list) and fact:
            return [list(row) for row in zip(*map(self._column, fact), strict=True)]
        if isinstance(fact, dict) and fact:
            rows = zip(*map(self._column, fact.values()), strict=True)
            return [dict(zip(fact, row, strict=True)) for row in rows]
        return [fact] * len(self)


def _value_at(facts: Any, path: Sequence[str]) -> Any:
    for name in path:
        facts = facts[name]
    return facts


def _has_slots(fact: Any) -> bool:
    if isinstance(fact, dict | list):
        return any(map(_has_slots, fact.values() if isinstance(fact, dict) else fact))
    return isinstance(fact, Slot)
