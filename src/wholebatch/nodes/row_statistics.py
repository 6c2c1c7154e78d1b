"""Statistics of each row and each column of S: the interface of losses to the softmax node.

A loss declares its positives, its candidates and the statistics that it needs. The node returns these statistics, and
the loss computes its value from them in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .._precision import accumulation_dtype
from ..contract import Facts, canaries_of
from ..logsumexp import shared_shift
from ..sweep import KernelSoftmaxSweep, Products, Selection
from .kernel_check import use_kernels
from .one_tile import OneTile, computes_one_tile
from .rehearsals import SoftmaxRehearsal
from .route import Layout, choose_route
from .shifts import never_underflows
from .softmax import Softmax, output_names
from .softmax_in_kernels import SoftmaxInKernels, in_kernels
from .softmax_plan import Bounds, LogitBounds, SoftmaxPlan
from .towers import Towers
from .views_in_kernels import TwoViewsInKernels, two_views_in_kernels

Scale = tuple[float, Any]  # the factor of S as a number or its bound, and as a tensor that may need a gradient


@dataclass(eq=False)
class RowStatistics:
    """The statistics of this rank's rows or columns: each (n,), in float64; None for fields not requested.

    Args:
        logsumexp: A, over the candidates.
        target: T, the sum of the positives' logits.
        logits: M, the sum of the candidates' logits.
        count: the number of candidates.
        largest: the largest logit of a negative.
        effective: the effective number of negatives, (sum E)^2 / sum E^2 over them: n if n negatives weigh the same.
    """

    logsumexp: Tensor
    target: Tensor | None = None
    logits: Tensor | None = None
    count: Tensor | None = None
    largest: Tensor | None = None
    effective: Tensor | None = None

    def first(self, rows: int) -> RowStatistics:
        """Return the statistics of the first rows."""
        cut: dict[str, Any] = {}
        for field in fields(self):
            x = getattr(self, field.name)
            cut[field.name] = None if x is None else x[:rows]
        return RowStatistics(**cut)


def statistics_fields(*, target: bool = True, mean_logit: bool = False, statistics: bool = False) -> tuple[str, ...]:
    """Return the names of the fields that a loss needs of its rows, or of its columns.

    Args:
        target: whether it needs T.
        mean_logit: whether it needs M and the number of candidates, for label smoothing.
        statistics: whether it needs the fields from which :class:`wholebatch.BatchStatistics` is computed.
    """
    names = ["sum", *(["target"] if target else []), *(["logits", "count"] if mean_logit else [])]
    return (*names, *(["largest", "negatives", "squares"] if statistics else []))


@dataclass(eq=False)
class Operands:
    """X and Y of one call.

    Args:
        features: the features that `towers` joins.
        towers: the features of X, the features of Y, and their normalization.
        layout: the owners of the rows of X and Y.
        guide: the guide's features of this rank's rows of Y, if the selection has a guide.
        narrow: whether the features were widened (`facts.widened()`) and are multiplied in the narrower dtype that they
            had before, which loses nothing.
    """

    features: Sequence[Tensor]
    towers: Towers
    layout: Layout
    guide: Tensor | None = None
    narrow: bool = False


def row_statistics(
    facts: Facts,
    scale: Scale,
    operands: Operands,
    selection: Selection,
    bounds: Bounds,
    *,
    rows: tuple[str, ...] = (),
    cols: tuple[str, ...] = (),
) -> tuple[RowStatistics | None, RowStatistics | None]:
    """Return the statistics of this rank's rows, and of its columns.

    Args:
        facts: of the call.
        scale: of S.
        operands: X and Y.
        selection: the positives and the candidates.
        bounds: of similarities. With statistics of the negatives alone ("squares" is requested), the bounds of positive
            pairs say nothing about the sums, and are not used.
        rows: the fields of rows, from `statistics_fields`; empty for none.
        cols: the fields of columns, likewise. A symmetric S takes `rows` only: its columns are its rows.
    """
    facts = facts.in_units()
    layout, features, towers = operands.layout, operands.features, operands.towers
    if layout.symmetric:
        rows, cols = (), rows
    offsets = selection.offsets
    if offsets is not None:
        selection = replace(selection, offsets=offsets.detach())
    dtype = facts.features_dtype if operands.narrow else features[0].dtype
    keep = "logits" not in rows and "logits" not in cols and selection.transform is None
    limits = _of_logits(
        _rounded(bounds, facts.products),
        scale[0],
        "squares" not in rows and "squares" not in cols,
        max(layout.rows.total, layout.cols.total),
    )
    shift = shared_shift(limits.largest, limits.terms, accumulation_dtype(dtype))

    def plan_of(facts: Facts) -> SoftmaxPlan:
        in_kernels = facts.kernels and KernelSoftmaxSweep.fields.issuperset((*rows, *cols))
        # Kernels multiply bfloat16 rows as they are, and apply their norms afterward.
        per_tile = in_kernels and dtype == torch.bfloat16 and facts.products.half in (None, dtype)
        return SoftmaxPlan(
            choose_route(facts, layout, keep=keep, exact=selection.over != "negatives"),
            replace(towers, normalize_per_tile=True) if per_tile and towers.normalize else towers,
            selection,
            operands.guide,
            facts.factor(*scale),
            limits,
            shift,
            size=(layout.rows if rows or layout.symmetric else layout.cols).total,
            rows=rows,
            cols=cols,
            differentiable=facts.differentiable,
            in_kernels=in_kernels,
            dtype=dtype if operands.narrow else None,
            canaries=canaries_of(facts.comm.transport).due() if in_kernels and facts.deferred is None else None,
            deferred=facts.deferred,
        )

    plan = plan_of(facts)
    if plan.in_kernels:
        learned = offsets is not None and offsets.requires_grad
        form = (
            *selection.pairs.kinds, selection.over,
            offsets is not None, learned, *rows, *cols, layout.symmetric, keep,
            plan.towers.normalize_per_tile, plan.towers.stay_norms is not None, plan.towers.travel_norms is not None,
        )  # fmt: skip
        keeps = facts.once(("keeps", plan.differentiable, *form), lambda: keep and _keeps(facts, layout, plan))
        if not use_kernels(
            facts, (*form, keeps), layout, lambda: SoftmaxRehearsal(facts, plan, layout, dtype, keeps, learned)
        ):
            plan = plan_of(facts.with_(kernels=False))
    if plan.in_kernels and plan.shift is not None and len(features) == 2:
        found = _in_few_launches(facts, plan, layout, features, scale[1], form)
        if found is not None:
            return found
    if len(features) == 2 and computes_one_tile(facts, plan, layout, dtype):
        of_rows, target, *of_cols = OneTile.apply(plan, scale[1], *features)
        return RowStatistics(of_rows, target), RowStatistics(*of_cols) if of_cols else None
    # Not all features are saved for the backward pass. This empty tensor depends on all of them and is saved, so that
    # autograd finds the node when a gradient is differentiated again, and the node raises.
    anchor = torch.cat([feature[:0].flatten() for feature in features])
    sides = _by_side(rows, cols, Softmax.apply(plan, anchor, scale[1], offsets, *features))
    return (sides[1], None) if layout.symmetric else sides


def _in_few_launches(
    facts: Facts, plan: SoftmaxPlan, layout: Layout, features: Sequence[Tensor], scale: Any, form: tuple[Any, ...]
) -> tuple[RowStatistics | None, RowStatistics | None] | None:
    """Return the statistics by the nodes for diagonal positives in kernels; None if these do not compute the call."""
    dtype, towers = features[0].dtype, plan.towers
    assert plan.shift is not None
    if not never_underflows(plan.bounds, plan.shift, accumulation_dtype(dtype)):
        return None
    counts, products = (layout.rows.counts, layout.cols.counts), facts.products
    in_form = "in kernels", *form, *counts, plan.differentiable, products.precision, products.units, dtype
    if layout.symmetric:
        views = facts.once(in_form, lambda: (two_views_in_kernels(facts, plan, layout, dtype),))[0]
        if views is None:
            return None
        return RowStatistics(*TwoViewsInKernels.apply(plan, views, facts.of_rows, scale, *features)), None
    shared = facts.once(in_form, lambda: (in_kernels(facts, plan, layout, dtype),))[0]
    if shared is None:
        return None
    x, y = (features[at[0]] for at in (towers.stays, towers.travels))
    return _by_side(plan.rows, plan.cols, SoftmaxInKernels.apply(plan, shared, facts.of_rows, scale, x, y))


def _by_side(
    rows: tuple[str, ...], cols: tuple[str, ...], outputs: Sequence[Tensor]
) -> tuple[RowStatistics | None, RowStatistics | None]:
    """Return the outputs of a node as the statistics of rows and of columns, which have these fields."""
    names = [output_names(rows), output_names(cols)]
    remaining = iter(outputs)
    of_rows, of_cols = (RowStatistics(**{name: next(remaining) for name in side}) if side else None for side in names)
    return of_rows, of_cols


def _keeps(facts: Facts, layout: Layout, plan: SoftmaxPlan) -> bool:
    """Return whether exponentials may be kept on any rank, the same on all."""
    memories = facts.of_ranks("memory")
    fits = max(layout.rows.counts) * layout.cols.total <= plan.route.budget.side**2
    return facts.differentiable and (any(isinstance(of, int) for of in memories) or (fits and "auto" in memories))


def _rounded(bounds: Bounds, products: Products) -> Bounds:
    """Return bounds of the similarities of rounded rows."""
    if not products.error:
        return bounds
    away = products.error * bounds.similarity
    least = None if bounds.min_pair_product is None else bounds.min_pair_product - away
    return replace(bounds, similarity=bounds.similarity + away, min_pair_product=least)


def _of_logits(bounds: Bounds, scale: float, pairs_count: bool, terms: int) -> LogitBounds:
    """Return the bounds of logits, from the bounds of similarities."""
    min_pair = None
    if pairs_count and scale >= 0 and bounds.min_pair_product is not None:
        min_pair = (bounds.add_positive or 1) * scale * bounds.min_pair_product
    return LogitBounds(
        abs(scale) * bounds.similarity + bounds.offset, min_pair, bounds.add_positive if pairs_count else 0.0, terms
    )
