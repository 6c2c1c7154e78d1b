"""Examples with labels, against themselves: those of the same class are positives, the others negatives.

    Z = rows of all ranks,    S = scale Z Z^T without its diagonal

S is symmetric: the tiles above its diagonal say all, and the work is half of a full sweep's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._checks import is_dense
from .._normalize import UNIT, normalize_rows
from ..partition import Diagonal
from ..sweep import Bend, Diagonals, EqualIds, Over, Pairs, Selection
from ._cross_entropy import how_many_equal
from ._door import Agreement, Options, agree
from ._softmax import Numbers, softmax_numbers
from ._towers import Towers


def agree_labeled(
    caller: str,
    options: Options,
    features: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    *,
    scalars: Mapping[str, Tensor | float] = MappingProxyType({}),
    positive: Sequence[str] = (),
    check: Callable[[], Mapping[str, Any]],
    must_match: Sequence[str] = (),
) -> Labeled:
    """As `agree`, on rows with labels: (b, d), or (b, v, d) for v views of each example, with b labels either way."""
    with_views = is_dense(features) and features.dim() == 3
    shape = features.shape[:-1] if with_views else None

    def check_views() -> Mapping[str, Any]:
        if shape is not None:
            one, each = tuple(shape[:1]), tuple(shape)
            for name, x, allowed in (("labels", labels, (one,)), ("weights", weights, (one, each))):
                if isinstance(x, Tensor) and tuple(x.shape) not in allowed:
                    raise ValueError(
                        f"{name} must have shape {' or '.join(map(str, allowed))} for features of shape "
                        f"{tuple(features.shape)}, (examples, views, feature size); got {tuple(x.shape)}"
                    )
        return check()

    rows = [features, labels, weights]
    if shape is not None:
        rows = [features.flatten(0, 1), *(_of_views(x, shape) for x in (labels, weights))]
    agreed = agree(
        caller,
        options,
        scalars=scalars,
        features={"features": rows[0]},
        positive=positive,
        ids={"labels": (rows[1], "features")},
        required=("labels",),
        weights=(rows[2], "features"),
        check=check_views,
        must_match=must_match,
    )
    return Labeled(agreed, shape)


def _of_views(x: Any, shape: Sequence[int]) -> Any:
    """(b,) or (b, v) as (b v,); what is neither is refused by the check."""
    if not isinstance(x, Tensor) or x.dim() not in (1, 2):
        return x
    return x.repeat_interleave(shape[1]) if x.dim() == 1 else x.flatten()


class Labeled:
    """The "features" and "labels" that ranks agreed on, and who is whose positive. Collective: 1 all-gather of ids."""

    def __init__(self, agreed: Agreement, views: torch.Size | None = None) -> None:
        self.agreed, self.rows, self._views, self._narrow = agreed, agreed.rows["features"], views, False
        local = self.rows.rows(agreed.rank)
        self.labels = agreed.ids("labels")
        self.local_labels = self.labels[local]
        itself = Diagonals(Diagonal(0, local.start, local.stop - local.start))
        self.pairs = Pairs(EqualIds(self.local_labels, self.labels, but=itself), itself)

    def widened(self) -> Labeled:
        """The same, for several calls of `numbers`, whose gradients are rounded once: see `Agreement.widened`."""
        self.agreed, self._narrow = self.agreed.widened(), True
        return self

    def reduce(self, losses: Tensor, count: int | Tensor, counted: Tensor | None = None) -> Tensor:
        """What the caller asked for: a scalar, or losses in the shape of the rows, (b,) or (b, v)."""
        loss = self.agreed.reduce(losses, count, counted)
        return loss if self._views is None or not loss.dim() else loss.view(self._views)

    @cached_property
    def positives(self) -> Tensor:
        """How many each of this rank's rows has, (b,)."""
        return how_many_equal(self.local_labels, self.labels) - 1

    @property
    def negatives(self) -> Tensor:
        """How many each of this rank's rows has, (b,)."""
        return self.rows.total - 1 - self.positives

    @property
    def anchors(self) -> Tensor:
        """How many rows of all ranks have a positive, shape ()."""
        return (how_many_equal(self.labels, self.labels) > 1).sum()

    @property
    def anchors_with_negatives(self) -> Tensor:
        """How many rows of all ranks have a positive and a negative, shape ()."""
        same = how_many_equal(self.labels, self.labels)
        return ((same > 1) & (same < self.rows.total)).sum()

    def numbers(
        self,
        scale: tuple[float, Any],
        over: Over,
        fields: tuple[str, ...],
        *,
        floor: Tensor | None = None,
        bend: Bend | None = None,
        bound: float = UNIT**2,
    ) -> Numbers:
        """Of this rank's rows, normalized. A floor belongs to rows: with one, all of S is computed."""
        z, symmetric = self.agreed.inputs["features"], floor is None
        numbers, _ = softmax_numbers(
            self.agreed,
            scale,
            [z] if symmetric else [normalize_rows(z)] * 2,
            towers=Towers(stays=(0,), normalize=True) if symmetric else Towers(stays=(0,), travels=(1,)),
            stays=self.rows,
            travels=self.rows,
            selection=Selection(self.pairs, over, floor=floor, bend=bend),
            bound=bound,
            rows=fields,
            symmetric=symmetric,
            narrow=self._narrow and symmetric,
        )
        assert numbers is not None
        return numbers
