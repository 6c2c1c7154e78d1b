"""The tensors of one call of late interaction, and the reductions over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..contract import Facts, Inputs
from ..logsumexp import cannot_underflow
from ..pair_loss.builtin_terms import Tower, reductions
from ..pair_loss.similarity import MAX_SIM, MAX_SIM_OF_ROWS
from ..sweep.items import shared_numbers_on
from ..tokens import Packed
from ._directions import NO_ID, check_reserved_ids, reserved_ids
from ._documents import NOBODY, Owners, inputs_of_texts
from ._late_interaction_terms import LateInteractionSettings

_REDUCED = {"query_to_document": "queries", "document_to_query": "documents"}  # whose rows or columns are reduced
_IDS = ("query_ids", "document_ids")


@dataclass(frozen=True)
class LateInteractionBatch:
    """The tensors of one call on this rank."""

    queries: Packed
    documents: Packed
    owners: Owners
    ids: dict[str, Tensor | None]
    settings: LateInteractionSettings

    @cached_property
    def has_ids(self) -> bool:
        """Whether queries or documents have ids."""
        return any(x is not None for x in self.ids.values())

    @cached_property
    def longest_query(self) -> int:
        """The most tokens of a query on this rank."""
        return max(self.queries.lengths, default=0)

    @cached_property
    def tokens(self) -> list[int]:
        """The number of tokens of queries, and of documents."""
        return [len(self.queries.vectors), len(self.documents.vectors)]

    def inputs(self, logit_scale: Tensor | float, weights: Tensor | None) -> Inputs:
        """Return the inputs that are validated across ranks."""
        return inputs_of_texts(
            self.queries,
            self.documents,
            scalars={"logit_scale": logit_scale},
            ids={name: (self.ids[name], texts) for name, texts in zip(_IDS, ("queries", "documents"), strict=True)},
            weights=(weights, "queries"),
        )

    def read_back(self) -> dict[str, Tensor]:
        """Return the numbers on the device that the checks of values need."""
        return reserved_ids(self.ids)

    def check_values(self, numbers: Mapping[str, float]) -> dict[str, Any]:
        """Raise ValueError for a reserved id; return no facts."""
        check_reserved_ids(self.ids, numbers)
        return {}

    def reduced(self, facts: Facts) -> list[dict[str, Tensor]]:
        """Return the reductions of each direction, (b,) each by the names of terms."""
        settings = self.settings
        query_tokens, document_tokens = (sum(counts) for counts in zip(*facts.of_ranks("tokens"), strict=True))
        documents_stay = query_tokens < document_tokens
        lengths, first = self.queries.lengths, facts.rows["queries"].offsets[facts.rank]
        positive_of = [NOBODY] * len(self.documents.lengths)
        for query, document in enumerate(self.owners.positives):
            positive_of[document] = first + query
        document_data = {"positive_of": shared_numbers_on(tuple(positive_of), facts.device)}
        if not settings.share_hard_negatives:
            queries = (NOBODY if query == NOBODY else first + query for query in self.owners.queries)
            document_data["query"] = shared_numbers_on(tuple(queries), facts.device)
        query_data = {}
        if settings.token_reduction == "mean":
            query_data["tokens"] = shared_numbers_on(lengths, facts.device).to(facts.dtype)
        if self.has_ids:
            query_data["id"], document_data["id"] = self._ids(facts)
        towers = {
            "queries": Tower(facts.inputs["queries"], lengths, query_data),
            "documents": Tower(facts.inputs["documents"], self.documents.lengths, document_data),
        }
        reduced = reductions(
            facts,
            MAX_SIM_OF_ROWS if documents_stay else MAX_SIM,
            settings.terms(
                ids=self.has_ids,
                statistics=facts.statistics,
                documents_are_rows=documents_stay,
                bounded=cannot_underflow(self._largest(facts), 0.0, facts.dtype),
            ),
            dict(sorted(towers.items(), reverse=not documents_stay)),
            {"scale": facts.inputs["logit_scale"]},
            [_REDUCED[direction] for direction in settings.directions],
        )
        document_terms = {}
        if reduced["documents"]:
            positives = self._positives(facts)
            document_terms = {name: x[positives] for name, x in reduced["documents"].items()}
        return [reduced["queries"] if name == "query_to_document" else document_terms for name in settings.directions]

    def _largest(self, facts: Facts) -> float:
        """Return a bound of all logits, on any rank."""
        error = 1 + facts.products.error
        similarity = error * facts.norms["queries"] * facts.norms["documents"]
        tokens = 1 if self.settings.token_reduction == "mean" else max(facts.of_ranks("longest query"))
        return abs(facts.scalars["logit_scale"]) * tokens * similarity

    def _positives(self, facts: Facts) -> Tensor:
        """Return each query's positive document on this rank, (b,)."""
        return shared_numbers_on(tuple(self.owners.positives), facts.device)

    def _ids(self, facts: Facts) -> tuple[Tensor, Tensor]:
        """Return the ids of queries and of documents; NO_ID where there is none."""
        positives, device = self._positives(facts), facts.device
        query_ids, document_ids = (None if x is None else x.to(device, torch.int64) for x in self.ids.values())
        if document_ids is None:
            assert query_ids is not None
            document_ids = torch.full((len(self.documents.lengths),), NO_ID, device=device)
            document_ids[positives] = query_ids
        return document_ids[positives] if query_ids is None else query_ids, document_ids
