"""The similarities of queries and keys of the global batch, direction by direction.

    query_to_key   s(q_i, k_j) over keys and negatives j      key_to_query   s(q_j, k_i) over queries j
    query_to_query s(q_i, q_j) over queries j != i            key_to_key     s(k_i, k_j) over keys and negatives j != i

Each direction gives statistics of every query i. The first two are the rows and the columns of one S, and share one
sweep. The larger tower stays on its rank, the smaller one travels. If the keys travel, a query is a row of S, and its
sum is complete on its rank. If there are more keys than queries, the queries travel and S is transposed: a query is
then a column, and the exchange adds up its sum. A ceiling on the similarities of negatives is a property of rows, so
a direction with a ceiling has its own sweep, whose rows stay; so has a direction with another scale.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..contract import Facts
from ..nodes import Bounds, Layout, Operands, RowStatistics, Scale, Towers, pair_losses, row_statistics
from ..nodes.cross_entropy import how_many_equal
from ..partition import Diagonal, Partition
from ..sweep import NONE, Diagonals, Entries, EqualIds, Pairs, Selection, Union
from ..sync import scale_gradient
from ._pairs import EqualIdsAre

Direction = Literal["query_to_key", "key_to_query", "query_to_query", "key_to_key"]
DIRECTIONS: tuple[Direction, ...] = ("query_to_key", "key_to_query", "query_to_query", "key_to_key")
NO_ID = torch.iinfo(torch.int64).min


def reserved_ids(ids: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return whether given ids contain `NO_ID`, (), by name, on the device."""
    return {name: (x.to(torch.int64) == NO_ID).any() for name, x in ids.items() if x is not None}


def check_reserved_ids(names: Iterable[str], reserved: Mapping[str, float]) -> None:
    """Raise ValueError for ids that contain `NO_ID`, from the numbers of `reserved_ids` on the host."""
    for name in names:
        if reserved.get(name):
            raise ValueError(f"{name} must not contain -2^63, which stands for no id; use another number")


class Retrieval:
    """The queries and keys of one call, and their positive pairs. Collective: an all-gather for each kind of ids.

    Args:
        facts: of "queries", "keys", "logit_scale", and if given "negatives", "query_ids", "key_ids", "negative_ids".
        equal_ids: whether other keys with a query's id are positives or excluded.
        fields: the statistics of rows, from :func:`wholebatch.nodes.statistics_fields`.
    """

    def __init__(self, facts: Facts, equal_ids: EqualIdsAre, fields: tuple[str, ...]) -> None:
        self._facts, self._fields = facts, fields
        self._queries = facts.rows["queries"]
        self._keys, self._local, self._local_keys = facts.once("keys", self._places)
        self._query_ids, self._key_ids = self._all_ids()
        self.several = self._query_ids is not None and equal_ids == "positive"
        self._norms = {
            "queries": facts.norms["queries"],
            "keys": max(facts.norms["keys"], facts.norms.get("negatives", 0.0)),
        }

    def _places(self) -> tuple[Partition, slice, slice]:
        """Return the owners of keys and negatives, and the places of the local queries and of their keys."""
        rows, rank = self._facts.rows, self._facts.rank
        counts = [rows[name].counts for name in ("keys", "negatives") if name in rows]
        keys, local = Partition(tuple(map(sum, zip(*counts, strict=True)))), self._queries.rows(rank)
        return keys, local, slice(keys.offsets[rank], keys.offsets[rank] + local.stop - local.start)

    @property
    def local_query_ids(self) -> Tensor:
        """The ids of this rank's queries, (b,)."""
        assert self._query_ids is not None
        return self._query_ids[self._local]

    def statistics(
        self,
        directions: Sequence[Direction],
        *,
        hardness: float = 0.0,
        ceiling: Ceiling | None = None,
        limited: Collection[Direction] = DIRECTIONS,
    ) -> dict[Direction, RowStatistics]:
        """Return the statistics of this rank's queries in each direction. Collective.

        The hardness is added to the scale of negatives in query_to_key, without gradient; in limited directions,
        negatives above the ceiling are left out.
        """
        ceilings = {name: ceiling if name in limited else None for name in DIRECTIONS}
        sides: dict[Direction, RowStatistics] = {}
        to_key, to_query = ("query_to_key" in directions, "key_to_query" in directions)
        if not hardness and ceilings["query_to_key"] is ceilings["key_to_query"] is None:
            sides |= self._between(to_key=to_key, to_query=to_query)
        else:
            if to_key:
                sides |= self._between(to_key=True, to_query=False, hardness=hardness, ceiling=ceilings["query_to_key"])
            if to_query:
                sides |= self._between(to_key=False, to_query=True, ceiling=ceilings["key_to_query"])
        if "query_to_query" in directions:
            sides["query_to_query"] = self._among("queries", ceilings["query_to_query"])
        if "key_to_key" in directions:
            sides["key_to_key"] = self._among("keys", ceilings["key_to_key"])
        if "negatives" in self._facts.rows:  # they get a gradient of zeros even if no direction uses them
            nothing = self._facts.inputs["negatives"][:0].sum()
            sides = {name: replace(side, logsumexp=side.logsumexp + nothing) for name, side in sides.items()}
        return sides

    def positives(self, direction: Direction) -> Tensor:
        """Return the number of positives of this rank's queries in a direction, (b,)."""
        assert self._query_ids is not None
        assert self._key_ids is not None
        queries, keys = self._query_ids[self._local], self._key_ids[self._local_keys]
        equal = (
            how_many_equal(queries, self._key_ids)
            if direction == "query_to_key"
            else how_many_equal(keys, self._query_ids)
        )
        return equal + (queries != keys)

    def pair_losses(self) -> Tensor | None:
        """Return the cross-entropy of each query with its only positive, (b,), in query_to_key; None if keys stay."""
        call, keys_stay, _ = self._call(to_key=True)
        return None if keys_stay else pair_losses(*call, both=False)

    def _between(
        self, *, to_key: bool, to_query: bool, hardness: float = 0.0, ceiling: Ceiling | None = None
    ) -> dict[Direction, RowStatistics]:
        """Return the statistics of query_to_key, of key_to_query, or of both from one sweep."""
        call, keys_stay, softer = self._call(to_key=to_key, hardness=hardness, ceiling=ceiling)
        wants_rows, wants_cols = (to_query, to_key) if keys_stay else (to_key, to_query)
        rows, cols = row_statistics(
            *call, rows=self._fields if wants_rows else (), cols=self._fields if wants_cols else ()
        )
        to_keys, to_queries = (cols, rows) if keys_stay else (rows, cols)
        sides: dict[Direction, RowStatistics] = {}
        if to_keys is not None:
            sides["query_to_key"] = to_keys if not hardness else _softened(to_keys, softer)
        if to_queries is not None:
            sides["key_to_query"] = to_queries.first(self._local.stop - self._local.start)
        return sides

    def _call(
        self, *, to_key: bool, hardness: float = 0.0, ceiling: Ceiling | None = None
    ) -> tuple[tuple[Facts, Scale, Operands, Selection, Bounds], bool, float]:
        """Return the call of `row_statistics` between queries and keys, whether keys stay, and scale / harder scale."""
        facts, (queries, *keys) = self._facts, self._towers()
        b = self._local.stop - self._local.start
        keys_stay = self._queries.total < self._keys.total if ceiling is None else not to_key
        if ceiling is not None and keys_stay:
            keys, key_rows = [keys[0][:b]], self._queries  # no other key has a query
        else:
            key_rows = self._keys
        rank = facts.rank
        key_tower = tuple(range(1, 1 + len(keys)))
        if keys_stay:
            stays, travels, towers = key_rows, self._queries, Towers(stays=key_tower, travels=(0,))
        else:
            stays, travels, towers = self._queries, key_rows, Towers(stays=(0,), travels=key_tower)
        matching = facts.once(("matching", keys_stay), lambda: Diagonals(Diagonal(0, travels.offsets[rank], b)))
        row_ids, col_ids = (self._key_ids, self._query_ids) if keys_stay else (self._query_ids, self._key_ids)
        if ceiling is not None and keys_stay and row_ids is not None:
            ids: Tensor | None = row_ids[self._local_keys]
        else:
            ids = None if row_ids is None else row_ids[stays.rows(rank)]
        scale, argument = facts.scalars["logit_scale"], facts.inputs["logit_scale"]
        selection = Selection(
            self._pairs(matching, ids, col_ids),
            over="all" if self.several else "negatives",
            **_ceiling_arguments(ceiling, "keys" if keys_stay else "queries", scale + hardness),
        )
        harder = scale + hardness
        softer = scale / harder if hardness else 1.0  # without hardness the scale may be 0
        if hardness:
            argument = scale_gradient(argument + hardness, harder / scale) if isinstance(argument, Tensor) else harder
        call = (
            facts,
            (harder, argument),
            Operands(
                [queries, *keys],
                towers,
                Layout(stays, travels),
                guide=None if ceiling is None else ceiling.traveling("queries" if keys_stay else "keys"),
                narrow=queries.dtype != facts.features_dtype,
            ),
            selection,
            Bounds(
                self._norms["queries"] * self._norms["keys"],
                min_pair_product=facts.min_pair_product,
                add_positive=0.0 if self.several else softer,
            ),
        )
        return call, keys_stay, softer

    def _among(self, tower: Literal["queries", "keys"], ceiling: Ceiling | None) -> RowStatistics:
        """Return the statistics of query_to_query or key_to_key, which have no positives."""
        facts, (queries, *keys) = self._facts, self._towers()
        rank, b = facts.rank, self._local.stop - self._local.start
        among_keys = tower == "keys"
        columns, ids = (self._keys, self._key_ids) if among_keys else (self._queries, self._query_ids)
        symmetric = columns.total == self._queries.total and ceiling is None
        itself = Diagonals(Diagonal(0, columns.offsets[rank], b))
        local_ids = None if ids is None else ids[self._local_keys if among_keys else self._local]
        excluded: Entries = itself if local_ids is None or ids is None else EqualIds(local_ids, ids)
        features = [queries] if not among_keys else keys if symmetric else [keys[0][:b], *keys]
        if symmetric:
            towers = Towers(stays=tuple(range(len(features))))
        elif among_keys:
            towers = Towers(stays=(0,), travels=tuple(range(1, len(features))))
        else:
            features, towers = [queries, queries], Towers(stays=(0,), travels=(1,))
        fields = tuple(name for name in self._fields if name != "target")
        scale = facts.scalars["logit_scale"]
        side, _ = row_statistics(
            facts,
            (scale, facts.inputs["logit_scale"]),
            Operands(
                features,
                towers,
                Layout(self._queries, columns, symmetric=symmetric),
                guide=None if ceiling is None else ceiling.traveling(tower),
                narrow=queries.dtype != facts.features_dtype,
            ),
            Selection(Pairs(NONE, excluded), **_ceiling_arguments(ceiling, tower, scale)),
            Bounds(self._norms[tower] ** 2),
            rows=fields,
        )
        assert side is not None
        return side

    def _towers(self) -> list[Tensor]:
        return [self._facts.inputs[name] for name in ("queries", "keys", "negatives") if name in self._facts.rows]

    def _pairs(self, matching: Diagonals, row_ids: Tensor | None, col_ids: Tensor | None) -> Pairs:
        if row_ids is None or col_ids is None:
            return self._facts.once(("pairs", matching), lambda: Pairs(matching))
        others = EqualIds(row_ids, col_ids, but=matching)
        return Pairs(Union(matching, others)) if self.several else Pairs(matching, excluded=others)

    def _all_ids(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the ids of all queries, and of all keys and negatives; NO_ID where there is none."""
        facts, vectors = self._facts, self._facts.vectors
        if "query_ids" not in vectors and "key_ids" not in vectors:
            return None, None
        b, device = self._local.stop - self._local.start, facts.device

        def no_ids(rows: int) -> Tensor:
            return torch.full((rows,), NO_ID, device=device)

        def ids_of(name: str, features: str) -> Tensor | None:
            if name in vectors:
                return vectors[name][0].to(device, torch.int64)
            return no_ids(len(facts.inputs[features])) if features in facts.rows else None

        keys = ids_of("key_ids", "keys")
        assert keys is not None
        queries = vectors["query_ids"][0].to(device, torch.int64) if "query_ids" in vectors else keys[:b]
        if "key_ids" not in vectors:
            keys = torch.cat([queries, keys[b:]])
        negatives = ids_of("negative_ids", "negatives")
        all_keys = keys if negatives is None else torch.cat([keys, negatives])
        return facts.all_gather(queries, self._queries), facts.all_gather(all_keys, self._keys)


@dataclass(frozen=True)
class Ceiling:
    """The largest similarity that a negative of query i may have, (b,): with guides, a similarity of guides."""

    largest: Tensor
    query_guides: Tensor | None = None
    key_guides: Tensor | None = None

    def selection_arguments(self, tower: Literal["queries", "keys"], scale: float) -> dict[str, Tensor]:
        """Return the arguments of a selection whose rows are this rank's queries, or their keys."""
        guide = self.traveling(tower)
        if guide is None:
            return {"ceiling": scale * self.largest}
        return {"ceiling": self.largest, "guide": guide[: len(self.largest)]}

    def traveling(self, tower: Literal["queries", "keys"]) -> Tensor | None:
        """Return the guide's features that travel with this rank's queries, or keys and negatives."""
        return self.query_guides if tower == "queries" else self.key_guides


def _ceiling_arguments(ceiling: Ceiling | None, tower: Literal["queries", "keys"], scale: float) -> dict[str, Any]:
    return {} if ceiling is None else ceiling.selection_arguments(tower, scale)


def _softened(side: RowStatistics, factor: float) -> RowStatistics:
    """Return the statistics of S with a raised scale, but with the logits and gradients of the original scale."""
    assert side.target is not None
    return replace(
        side,
        logsumexp=scale_gradient(side.logsumexp, factor),
        target=side.target * factor,
        logits=None if side.logits is None else scale_gradient(side.logits, factor),
        largest=None if side.largest is None else side.largest * factor,
    )
