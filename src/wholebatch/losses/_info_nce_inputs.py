"""The tensors of InfoNCE, and the checks of their combinations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._base.checks import check_alike, check_features, check_norm, norm_bound
from ..contract import Inputs
from ._directions import check_reserved_ids, reserved_ids
from ._hard_negatives import check_hard_negatives, rows_of
from ._info_nce_options import InfoNCESettings


@dataclass(eq=False)
class InfoNCETensors:
    """The tensors of one call, as :func:`wholebatch.functional.info_nce_loss` describes them."""

    queries: Tensor
    keys: Tensor
    negatives: Tensor | None
    hard_negatives: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    negative_ids: Tensor | None
    hard_negative_ids: Tensor | None
    query_guides: Tensor | None
    key_guides: Tensor | None
    weights: Tensor | None

    @property
    def has_ids(self) -> bool:
        """Whether queries or keys have ids."""
        return self.query_ids is not None or self.key_ids is not None

    @property
    def has_values(self) -> bool:
        """Whether there are ids or guides, whose values are checked."""
        return self.has_ids or self.negative_ids is not None or self.query_guides is not None

    @property
    def is_simple(self) -> bool:
        """Whether all tensors are among `inputs`, in the shapes in which the caller passed them."""
        others = (self.hard_negatives, self.hard_negative_ids, self.query_guides, self.key_guides)
        return all(x is None for x in others)

    @property
    def _ids(self) -> dict[str, tuple[Tensor | None, str]]:
        return {
            "query_ids": (self.query_ids, "queries"),
            "key_ids": (self.key_ids, "keys"),
            "negative_ids": (self.negative_ids, "negatives"),
        }

    @property
    def _guides(self) -> dict[str, Tensor]:
        guides = {"query_guides": self.query_guides, "key_guides": self.key_guides}
        return {name: x for name, x in guides.items() if x is not None}

    def inputs(self, logit_scale: Tensor | float, *, any_scale: bool) -> Inputs:
        """Return the inputs that are validated across ranks."""
        return Inputs(
            features={
                "queries": self.queries,
                "keys": self.keys,
                "negatives": self.negatives,
                "hard_negatives": rows_of(self.hard_negatives),
            },
            scalars={"logit_scale": logit_scale},
            ids=self._ids,
            weights=(self.weights, "queries"),
            optional=("negatives", "hard_negatives"),
            matching=("queries", "keys"),
            any_scale=any_scale,
        )

    def check(self, settings: InfoNCESettings) -> list[Any] | None:
        """Raise ValueError unless the tensors can be combined with each other and with the settings.

        Returns:
            The facts about guides that must be equal on all ranks; None without guides.
        """
        settings.check_positives(settings.equal_ids == "positive" and self.has_ids, self.hard_negatives)
        if len(self.keys) < len(self.queries):
            raise ValueError(
                f"keys must have at least as many rows as queries, got {len(self.keys)} and {len(self.queries)}; key i "
                "is the positive of query i"
            )
        if self.hard_negatives is not None:
            if "query_to_key" not in settings.directions:
                raise ValueError(
                    f"hard_negatives requires 'query_to_key' in directions, got {settings.directions}; add it, or pass "
                    "them as negatives of all queries"
                )
            check_hard_negatives(self.queries, self.hard_negatives, self.hard_negative_ids)
        for ids, rows in (("negative_ids", "negatives"), ("hard_negative_ids", "hard_negatives")):
            if getattr(self, ids) is not None and (not self.has_ids or getattr(self, rows) is None):
                raise ValueError(
                    f"{ids} requires {rows}, and query_ids or key_ids to compare them with; pass these too"
                )
        return self._check_guides(settings.exclude_above)

    def _check_guides(self, exclude_above: float | None) -> list[Any] | None:
        guides = self._guides
        if not guides:
            return None
        if len(guides) < 2 or exclude_above is None:
            raise ValueError(
                "query_guides, key_guides and exclude_above go together; pass all three, or neither of the guides"
            )
        below = 0 if self.negatives is None else len(self.negatives)
        rows = {"query_guides": len(self.queries), "key_guides": len(self.keys) + below}
        for name, x in guides.items():
            check_features(name, x)
            if len(x) != rows[name]:
                order = " (keys, and negatives below them)" if name == "key_guides" else ""
                raise ValueError(f"{name} must have {rows[name]} rows{order}, got {len(x)}")
        check_alike("query_guides", guides["query_guides"], "key_guides", guides["key_guides"], rows=False)
        return [guides["query_guides"].shape[1], str(guides["query_guides"].dtype)]

    def read_back(self) -> dict[str, Tensor]:
        """Return the numbers on the device that the checks of values need."""
        if not self.has_values:
            return {}
        reserved = reserved_ids({name: x for name, (x, _) in self._ids.items()})
        return {**reserved, **{name: norm_bound(x) for name, x in self._guides.items()}}

    def check_values(self, numbers: Mapping[str, float]) -> dict[str, Any]:
        """Raise ValueError for a reserved id, and for guides that are not finite; return no facts."""
        check_reserved_ids(self._ids, numbers)
        for name, x in self._guides.items():
            check_norm(name, x, numbers[name])
        return {}
