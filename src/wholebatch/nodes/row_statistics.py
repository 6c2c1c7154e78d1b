"""Statistics of each row and each column of S: the interface of losses to the softmax node.

A loss declares its positives, its candidates and the statistics that it needs. The node returns these statistics, and
the loss computes its value from them in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .._base.precision import accumulation_dtype
from ..contract import Facts, state_of
from ..logsumexp import shared_shift
from ..partition import Diagonal, Partition
from ..sweep import Diagonals, KernelSoftmaxSweep, Pairs, Selection
from .in_kernels import InKernels
from .kernel_check import random_numbers, random_rows, use_kernels
from .matrix import has_matrix, statistics_of_matrix
from .one_tile import OneTile, is_one_tile
from .rehearsals import SHIFT, NodeCall, NodeRehearsal, moderate_scale
from .route import Layout, Route, choose_route
from .softmax import Softmax, output_names
from .softmax_in_kernels import SoftmaxInKernels, in_kernels
from .softmax_plan import Bounds, LogitBounds, Operands, SoftmaxPlan
from .towers import Towers
from .views_in_kernels import TwoViewsInKernels, two_views_in_kernels

Scale = tuple[float, Any]  # the factor of S as a number or its bound, and as a tensor that may need a gradient


@dataclass(eq=False)
class RowStatistics:
    """The statistics of this rank's rows or columns: each (n,), in float64; None for fields not requested."""

    logsumexp: Tensor  # A, over the candidates
    target: Tensor | None = None  # T, the sum of the positives' logits
    logits: Tensor | None = None  # M, the sum of the candidates' logits
    count: Tensor | None = None  # the number of candidates
    largest: Tensor | None = None  # the largest logit of a negative
    # effective: the effective number of negatives, (sum E)^2 / sum E^2 over them: n if n negatives weigh the same
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
    return Planned(facts, scale, operands, selection, bounds, rows, cols).statistics()


class Planned:
    """The call of `row_statistics` with these arguments, and its plan. Collective at the first call of a form.

    Args:
        facts, scale, operands, selection, bounds, rows, cols: as there.
        timed: makes a step on random features, whose time decides between kernels and plain PyTorch.
        rehearses: whether this is such a step. Its kernels were checked.
    """

    def __init__(
        self,
        facts: Facts,
        scale: Scale,
        operands: Operands,
        selection: Selection,
        bounds: Bounds,
        rows: tuple[str, ...],
        cols: tuple[str, ...],
        timed: Callable[[Planned, int, bool], Callable[[], None] | None] | None = None,
        rehearses: bool = False,
    ) -> None:
        self.facts, self.scale, self.operands = facts.in_units(), scale, operands
        self._given = facts
        layout, features = operands.layout, operands.features
        self._offsets = offsets = selection.offsets
        if offsets is not None:
            selection = replace(selection, offsets=offsets.detach())
        self._selection = selection
        self.fields = rows, cols = ((), rows) if layout.symmetric else (rows, cols)
        self.dtype = self.facts.features_dtype if operands.narrow else features[0].dtype
        self._rehearses = rehearses
        self._keep = "logits" not in rows and "logits" not in cols and selection.transform is None
        self._limits = bounds.of_logits(
            scale[0],
            error=self.facts.products.error,
            pairs_count="squares" not in rows and "squares" not in cols,
            terms=max(layout.rows.total, layout.cols.total),
        )
        self._shift = shared_shift(self._limits.largest, self._limits.terms, accumulation_dtype(self.dtype))
        self.plan = plan = self._plan(self.facts)
        self._form: tuple[Any, ...] = ()
        if plan.in_kernels:
            learned = offsets is not None and offsets.requires_grad
            self._form = form = (
                *selection.pairs.kinds, selection.over,
                offsets is not None, learned, rows, cols, layout.symmetric, self._keep,
                plan.towers.normalize_per_tile, plan.towers.stay_norms is not None,
                plan.towers.travel_norms is not None,
            )  # fmt: skip
            if (
                not rehearses
                and not self._is_small
                and not use_kernels(
                    self.facts,
                    form,
                    layout,
                    lambda: NodeRehearsal(
                        self.facts,
                        plan.route,
                        layout,
                        self.dtype,
                        self._node,
                        timed and partial(timed, self),
                        selection.best_of,
                        partial(self._node, views=True),
                    ),
                )
            ):
                self.plan = self._plan(self.facts.with_(kernels=False))

    def _plan(self, facts: Facts) -> SoftmaxPlan:
        (rows, cols), operands, layout = self.fields, self.operands, self.operands.layout
        towers, products = operands.towers, facts.products
        in_kernels = facts.kernels and KernelSoftmaxSweep.fields.issuperset((*rows, *cols))
        # Kernels multiply bfloat16 rows as they are, and apply their norms afterward.
        per_tile = in_kernels and self.dtype == torch.bfloat16 and products.half in (None, self.dtype)
        compares = in_kernels and facts.deferred is None and not self._rehearses
        return SoftmaxPlan(
            choose_route(facts, layout, keep=self._keep, exact=self._selection.over != "negatives"),
            replace(towers, normalize_per_tile=True) if per_tile and towers.normalize else towers,
            self._selection,
            operands.guide,
            facts.factor(*self.scale),
            self._limits,
            self._shift,
            size=(layout.rows if rows or layout.symmetric else layout.cols).total,
            rows=rows,
            cols=cols,
            differentiable=facts.differentiable,
            in_kernels=in_kernels,
            dtype=self.dtype if operands.narrow else None,
            canaries=state_of(facts.comm.transport).canaries.due() if compares else None,
            deferred=facts.deferred,
            assumption=facts.assumption,
        )

    def _node(self, route: Route, x: Tensor, y: Tensor, in_kernels: bool, *, views: bool = False) -> NodeCall:
        """Return leaves and outputs of the softmax node, with this call's pairs and fields, for random rows.

        With `views`, those of the node of two views as well, if calls of this form may take it.
        """
        plan, towers, symmetric = self.plan, self.plan.towers, self.operands.layout.symmetric
        norms = [random_numbers(len(z), z.device, seed)[:, None] for seed, z in ((2, x), (3, y))]
        stay, travel = (values.to(accumulation_dtype(self.dtype)) for values in norms)
        alone = Towers((0,), () if symmetric else (1,), towers.normalize, towers.normalize_per_tile)
        if towers.normalize or towers.stay_norms is not None:
            x = (x * stay).to(x.dtype)
        if towers.stay_norms is not None:
            alone = replace(alone, stay_norms=stay)
        if towers.travel_norms is not None:
            y, alone = (y * travel).to(y.dtype), replace(alone, travel_norms=travel)
        guide = None if plan.guide is None else random_rows(len(y), plan.guide.shape[1], plan.guide, 5)
        rehearsed = replace(
            plan, route=route, towers=alone, guide=guide, scale=moderate_scale(x.shape[1]), shift=SHIFT,
            bounds=LogitBounds(0.0, None, 0.0, 1), in_kernels=in_kernels, canaries=None, deferred=None, assumption=None,
        )  # fmt: skip
        leaves = [z.requires_grad_(plan.differentiable) for z in ((x,) if symmetric else (x, y))]
        offsets = None
        if self._offsets is not None and self._offsets.requires_grad:
            offsets = self._offsets[: len(x)].detach().requires_grad_()
        anchor = torch.cat([z[:0].flatten() for z in leaves])
        return [*leaves, *([] if offsets is None else [offsets])], lambda: (
            *Softmax.apply(rehearsed, anchor, rehearsed.scale, offsets, *leaves),
            *(self._two_views(rehearsed, leaves[0]) if views and in_kernels and symmetric else ()),
        )

    def _two_views(self, rehearsed: SoftmaxPlan, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the node of two views, of which each has half of the rows, if it computes this form."""
        facts, plan, b = self.facts, self.plan, len(x) // 2
        if two_views_in_kernels(facts, plan, self.operands.layout, self.dtype) is None:
            return ()
        pairs = Pairs(Diagonals(Diagonal(0, b, b), Diagonal(b, 0, b)), Diagonals(Diagonal(0, 0, 2 * b)))
        views = replace(rehearsed, towers=plan.towers, selection=replace(plan.selection, pairs=pairs))
        rows = Partition((2 * b,))
        form = two_views_in_kernels(facts, views, Layout(rows, rows, symmetric=True), self.dtype)
        assert form is not None
        outputs: tuple[Tensor, ...] = TwoViewsInKernels.apply(views, form, None, views.scale, *x[: 2 * b].split(b))
        return outputs

    def statistics(self) -> tuple[RowStatistics | None, RowStatistics | None]:
        """Return what `row_statistics` returns. Collective."""
        plan, symmetric = self.plan, self.operands.layout.symmetric
        if (outputs := self._in_few_operations()) is not None:
            return (RowStatistics(*outputs), None) if symmetric else _split_sides(plan.rows, plan.cols, outputs)
        features = self.operands.features
        if self._is_small:
            outputs = statistics_of_matrix(self._given, plan, self.operands, self.scale[1], self._offsets)
            sides = _split_sides(*self.fields, outputs)
            return (sides[1], None) if symmetric else sides
        # Not all features are saved for the backward pass. This empty tensor depends on all of them and is saved, so
        # that autograd finds the node when a gradient is differentiated again, and the node raises.
        anchor = torch.cat([feature[:0].flatten() for feature in features])
        sides = _split_sides(*self.fields, Softmax.apply(plan, anchor, self.scale[1], self._offsets, *features))
        return (sides[1], None) if symmetric else sides

    def losses(self) -> Tensor | None:
        """Return the cross-entropies of pairs, (b,), by a node of few operations; None if none computes the call."""
        self.plan.pairs_alone = True  # which these nodes alone read
        outputs = self._in_few_operations()
        return None if outputs is None else outputs[0]

    def _in_few_operations(self) -> tuple[Tensor, ...] | None:
        """Return the outputs of a node for diagonal positives, of one tile or in kernels; None if there is none."""
        facts, plan, operands = self.facts, self.plan, self.operands
        scale, outputs = self.scale[1], tuple[Tensor, ...]()
        if is_one_tile(facts, plan, operands.layout, self.dtype):
            outputs = OneTile.apply(plan, scale, *operands.features)
        elif plan.in_kernels and (form := self._form_in_kernels) is not None:
            node: Any = TwoViewsInKernels if operands.layout.symmetric else SoftmaxInKernels
            x, y = (operands.features[i] for i in (*plan.towers.stays, *plan.towers.travels))
            outputs = node.apply(plan, form, facts.row_numbers, scale, x, y)
        return outputs or None

    @cached_property
    def _is_small(self) -> bool:
        """Whether all of S is one matrix, where no node of few launches computes it."""
        if self._rehearses or (self.plan.in_kernels and self._form_in_kernels is not None):
            return False
        return has_matrix(self.facts, self.plan, self.operands)

    @cached_property
    def _form_in_kernels(self) -> InKernels | None:
        """The facts that calls of this form share in a node for diagonal positives; None if none computes them."""
        facts, plan, layout, features = self.facts, self.plan, self.operands.layout, self.operands.features
        if not plan.in_kernels or plan.shift is None or len(features) != 2:
            return None
        dtype, products = self.dtype, facts.products
        if not plan.bounds.exclude_underflow(plan.shift, accumulation_dtype(dtype)):
            return None
        form_of = two_views_in_kernels if layout.symmetric else in_kernels
        counts = layout.rows.counts, layout.cols.counts
        name = "in kernels", *self._form, *counts, plan.differentiable, products.precision, products.units, dtype
        return facts.once(name, lambda: form_of(facts, plan, layout, dtype))


def _split_sides(
    rows: tuple[str, ...], cols: tuple[str, ...], outputs: Sequence[Tensor]
) -> tuple[RowStatistics | None, RowStatistics | None]:
    """Return the outputs of a node as the statistics of rows and of columns, which have these fields."""
    names = [output_names(rows), output_names(cols)]
    remaining = iter(outputs)
    row_side, col_side = [RowStatistics(**{name: next(remaining) for name in side}) if side else None for side in names]
    return row_side, col_side
