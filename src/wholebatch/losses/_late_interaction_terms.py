"""Late interaction as terms of a declared loss: settings, the terms that they ask for, and the losses of queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from .._base.checks import check_choice, check_label_smoothing
from .._base.settings import check_flag, shown
from ..nodes import RowStatistics
from ..nodes.cross_entropy import many_positives, one_positive
from ..pair_loss.reductions import Term
from ..terms import Count, LogSumExp, Max, Sum
from ._directions import NO_ID
from ._documents import NOBODY
from ._pairs import EQUAL_IDS

DocumentDirection = Literal["query_to_document", "document_to_query"]
TokenReduction = Literal["sum", "mean"]
TOKEN_REDUCTIONS = ("sum", "mean")
DIRECTIONS = ("query_to_document", "document_to_query")

OfPair = Callable[[Any, Any], Tensor]  # a function of the data of a query and of a document


@dataclass(frozen=True)
class LateInteractionSettings:
    """The settings of one call, as :func:`wholebatch.functional.max_sim_loss` describes them."""

    share_hard_negatives: bool
    equal_ids: str
    directions: tuple[str, ...]
    token_reduction: str
    label_smoothing: float

    def check(self) -> None:
        """Raise ValueError unless the settings are valid."""
        check_flag("share_hard_negatives", self.share_hard_negatives)
        check_choice("equal_ids", self.equal_ids, EQUAL_IDS)
        check_choice("token_reduction", self.token_reduction, TOKEN_REDUCTIONS)
        check_label_smoothing(self.label_smoothing)
        known = all(isinstance(direction, str) and direction in DIRECTIONS for direction in self.directions)
        if not known or not self.directions or len(set(self.directions)) < len(self.directions):
            raise ValueError(f"directions must be one or both of {list(DIRECTIONS)}, got {shown(self.directions)}")

    @lru_cache(maxsize=64)  # noqa: B019 - settings are frozen, and terms are asked what they read only once
    def terms(self, *, ids: bool, statistics: bool, documents_are_rows: bool, bounded: bool) -> dict[str, Term]:
        """Return the terms of all directions; `bounded`: no sum of exponentials needs a shift."""
        several = ids and self.equal_ids == "positive"

        def matched(q: Any, d: Any) -> Tensor:
            mask: Tensor = d.positive_of == q.index
            return mask | (d.id == q.id) & (q.id != NO_ID) if several else mask

        def negative(q: Any, d: Any) -> Tensor:
            mask: Tensor = ~matched(q, d) if several else d.positive_of != q.index
            if ids and not several:
                mask = mask & ((d.id != q.id) | (q.id == NO_ID))
            if not self.share_hard_negatives:
                mask = mask & ((d.positive_of != NOBODY) | (d.query == NOBODY) | (d.query == q.index))
            return mask

        def candidate(q: Any, d: Any) -> Tensor:
            return matched(q, d) | negative(q, d) if several else negative(q, d)

        def oriented(function: OfPair) -> OfPair:
            return (lambda x, y: function(y, x)) if documents_are_rows else function

        def factor(s: Any, x: Any, y: Any, p: Any) -> Tensor:
            scale: Tensor = p.scale
            return scale / (y if documents_are_rows else x).tokens if self.token_reduction == "mean" else scale

        def score(s: Any, x: Any, y: Any, p: Any) -> Tensor:
            scores: Tensor = factor(s, x, y, p) * s
            return scores

        def doubled(s: Any, x: Any, y: Any, p: Any) -> Tensor:
            return 2 * score(s, x, y, p)

        candidates, positives, negatives = map(oriented, (candidate, matched, negative))
        terms: dict[str, Term] = {
            "logsumexp": LogSumExp(score, candidates, bound=0.0 if bounded else None),
            "target": Sum(score, positives),
        }
        if several:
            terms["positives"] = Count(positives)
        if self.label_smoothing:
            terms |= {"logits": Sum(score, candidates), "count": Count(candidates)}
        if statistics:
            terms |= {
                "largest": Max(score, negatives, ties="split"),
                "negatives": LogSumExp(score, negatives),
                "squares": LogSumExp(doubled, negatives),
            }
        for term in terms.values():
            if term.score is score and term.ties == "first":
                term.factor = factor
        return terms


@dataclass(frozen=True)
class Side:
    """One direction: statistics of each query's softmax, and the number of its positives, (b,) each; None: one."""

    statistics: RowStatistics
    positives: Tensor | None

    @classmethod
    def of(cls, reduced: Mapping[str, Tensor]) -> Side:
        effective = None
        if "squares" in reduced:
            effective = torch.where(
                reduced["squares"].isneginf(), 0.0, (2 * reduced["negatives"] - reduced["squares"]).exp()
            )
        statistics = RowStatistics(
            reduced["logsumexp"],
            reduced["target"],
            reduced.get("logits"),
            reduced.get("count"),
            reduced.get("largest"),
            effective,
        )
        return cls(statistics, reduced.get("positives"))

    @property
    def target(self) -> Tensor:
        """The (mean) logit of each query's positives."""
        assert self.statistics.target is not None
        return self.statistics.target if self.positives is None else self.statistics.target / self.positives

    def losses(self, label_smoothing: float) -> Tensor:
        """Return the cross-entropy of each query, (b,)."""
        if self.positives is not None:
            return many_positives(self.statistics, self.positives, label_smoothing=label_smoothing)
        return one_positive(self.statistics, self.target, label_smoothing=label_smoothing)
