"""Sums of exponentials of rows and columns, with one shift for all, or with one for each if a sum underflows.

Under one shift for all, an entry's exponential is used in the sum of its row and in the sum of its column. In most
steps, bounds alone show that no sum underflows. Otherwise an underflow check reads the sums once. If a sum underflows,
the logits of each row and of each column are shifted by their maximum. See `wholebatch.logsumexp` for shift and check.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._base.precision import accumulation_dtype, wide_dtype
from ..comm import Communicator
from ..comm.inside import all_reduce
from ..exchange import ColumnData, Initial
from ..kernels import exact
from ..logsumexp import count_underflowed
from ..sweep import Block, KernelSoftmaxSweep, Sums
from .softmax_plan import Data, SoftmaxPlan


def sums_of_sides(plan: SoftmaxPlan, data: Data) -> tuple[Sums, Sums, Tensor | None]:
    """Return the sums of this rank's rows and of its columns, and exp(S) where it is kept."""
    dtype = accumulation_dtype(data.x.dtype)
    shift = plan.shift
    if shift is not None:
        shift = exact(shift) if plan.in_kernels else shift
        budget = plan.route.budget
        kept = data.x.new_empty(budget.kept, dtype=budget.kept_dtype) if plan.keep else None
        rows, cols = _sums(plan, data, shift, shift, kept)
        if plan.bounds.exclude_underflow(shift, dtype):
            return rows, cols, kept
        sums = _sums_in_loss(plan, rows, cols)
        if plan.deferred is not None:  # nothing is read on the host
            plan.deferred.require(count_underflows(plan.route.comm, sums, plan.bounds.terms, dtype) == 0)
            return rows, cols, kept
        if no_underflow(plan.route.comm, sums, plan.bounds.terms, dtype):
            return rows, cols, kept
        del rows, cols, kept
        if plan.assumption is not None:
            plan.assumption.seen.underflowed = True
    row_max, col_max = _maxima(plan, data)
    return *_sums(plan, data, row_max, col_max, None), None


def no_underflow(comm: Communicator, sums: Sequence[Tensor], terms: int, dtype: torch.dtype) -> bool:
    """Return whether all of these sums of all ranks are exact to rounding. Collective: that of `count_underflows`."""
    return not count_underflows(comm, sums, terms, dtype).item()


def count_underflows(comm: Communicator, sums: Sequence[Tensor], terms: int, dtype: torch.dtype) -> Tensor:
    """Count the sums of all ranks that are not exact to rounding, (). Collective: one all-reduce of a number."""
    bad = torch.stack([count_underflowed(side_sums, terms, dtype) for side_sums in sums]).sum()
    return all_reduce(comm, bad.to(wide_dtype(bad.device)))


def _sums_in_loss(plan: SoftmaxPlan, rows: Sums, cols: Sums) -> list[Tensor]:
    """Return the sums whose logarithms the loss takes. They contain the pair's exponential if the loss adds it."""
    sums, factor = [], plan.bounds.add_positive
    for side, other in ((rows, cols), (cols, rows)):
        if side.fields:
            side_sums = side.fields["sum"]
            if factor:  # a pair has the same logit in its row and its column
                target = side.fields["target"] if "target" in side.fields else other.fields["target"]
                side_sums = side_sums + (factor * target - side.shift).exp()
            sums.append(side_sums)
    return sums


def _maxima(plan: SoftmaxPlan, data: Data) -> tuple[Tensor | None, Tensor | None]:
    """Return the largest logit of each row, and of each column whose statistics this rank keeps.

    A row or column without candidates has 0. A side whose statistics the loss does not need is None.
    """
    x = data.x

    def nothing(count: int) -> Tensor:
        return x.new_full((count, 1), float("-inf"), dtype=accumulation_dtype(x.dtype))

    row_max = nothing(data.count)[:, 0] if plan.rows and not plan.symmetric else None
    sweep = plan.sweep(data)

    def visit(block: Block, columns: ColumnData) -> None:
        rows, cols = columns.local if plan.symmetric else row_max, columns.accumulated
        sweep.maxima(block, None if rows is None else rows.view(-1), None if cols is None else cols[:, 0])

    col_max = plan.route.exchange.accumulate(data.fetched, visit, initial=nothing if plan.cols else None, op="max")
    if col_max is not None:
        col_max = plan.route.exchange.reduce(col_max, "max")[:, 0]
    row_max, col_max = (None if m is None else m.masked_fill(m.isneginf(), 0.0) for m in (row_max, col_max))
    return row_max, col_max


def _sums(
    plan: SoftmaxPlan,
    data: Data,
    row_shift: Tensor | float | None,
    col_shift: Tensor | float | None,
    kept: Tensor | None,
) -> tuple[Sums, Sums]:
    """Return the statistics of this rank's rows and columns, with one shift for all or one for each."""
    x, wide, local_cols = data.x, wide_dtype(data.x.device), plan.route.exchange.kept_local
    row_fields = _initial(plan.rows, x, wide)(data.count) if plan.rows and not plan.symmetric else None
    sweep = plan.sweep(data, kept)
    ops = tuple("max" if name == "largest" else "sum" for name in plan.cols)
    carried = col_shift[None] if isinstance(col_shift, Tensor) else None
    if plan.symmetric and isinstance(col_shift, Tensor):
        row_shift = col_shift[local_cols]

    def visit(block: Block, columns: ColumnData) -> None:
        names, fields = (plan.cols, columns.local) if plan.symmetric else (plan.rows, row_fields)
        shift = col_shift if columns.carried is None else columns.carried[0]
        sweep.sums(block, _as_sums(row_shift, names, fields), _as_sums(shift, plan.cols, columns.accumulated))

    col_fields = plan.route.exchange.accumulate(
        data.fetched,
        visit,
        carried=carried,
        initial=_initial(plan.cols, x, wide) if plan.cols else None,
        op=ops,
    )
    if plan.canaries is not None and isinstance(sweep, KernelSoftmaxSweep) and sweep.difference is not None:
        plan.canaries.note_sums(sweep.difference)
    if col_fields is not None:
        col_fields = plan.route.exchange.reduce(col_fields, ops)[local_cols].clone()
        col_shift = col_shift[local_cols] if isinstance(col_shift, Tensor) else col_shift
    nothing = Sums(0.0, {})
    return _as_sums(row_shift, plan.rows, row_fields) or nothing, _as_sums(col_shift, plan.cols, col_fields) or nothing


def _initial(fields: tuple[str, ...], x: Tensor, dtype: torch.dtype) -> Initial:
    """Return what makes k fields before any entry, (count, k)."""

    def make(count: int) -> Tensor:
        values = x.new_zeros(count, len(fields), dtype=dtype)
        if "largest" in fields:
            values[:, fields.index("largest")] = float("-inf")
        return values

    return make


def _as_sums(shift: Tensor | float | None, names: tuple[str, ...], fields: Tensor | None) -> Sums | None:
    """Return the columns of fields, (n, k), under their names; None without fields."""
    if fields is None:
        return None
    assert shift is not None
    return Sums(shift, dict(zip(names, fields.unbind(1), strict=True)))
