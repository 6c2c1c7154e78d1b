"""The sweep of a declared loss as an autograd node: reductions of all rows and columns, and gradients of all inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.precision import accumulation_dtype, wide_dtype
from ..contract import Facts
from ..exchange import ColumnData, zeros
from ..nodes import Route, Vectors, token_driver
from ..partition import Partition
from ..sweep import Block, Driver, KeptTiles
from .accumulators import Kept
from .compiled import Kernels
from .failure import Failure
from .sweep import Gradients, PairSweep, Side
from .tile import Affine, Reduced


@dataclass(frozen=True)
class PairPlan:
    """The facts that the forward and the backward pass of one call share.

    Args:
        facts: of the call.
        route: of Y.
        kinds: of similarities, by name.
        widths: columns of the features of each.
        reduced: the terms that tiles compute.
        rows, cols: the owners of the rows of X and of Y.
        x_numbers: constants of the local rows, (b,) each.
        y_numbers: constants of all columns, (B,) each.
        x_learned, y_learned, p_learned: the names of the numbers and parameters with a gradient, in order.
        parameters: by name; those with a gradient are replaced by the node's inputs.
        symmetric: whether Y is X and half of the tiles suffice.
        kernels: compiled functions of tiles; None: nobody asked for them.
        signature: of the declaration, by which they are kept.
        vectors: of rows and columns that consist of several, in late interaction; None: each is one vector.
        affine: which scores are affine in the similarity, once the forward pass knows.
        constant: the names of similarities whose features have no gradient.
        failure: of the call.
    """

    facts: Facts
    route: Route
    kinds: Mapping[str, str]
    widths: Mapping[str, int]
    reduced: Sequence[Reduced]
    rows: Partition
    cols: Partition
    x_numbers: Mapping[str, Tensor]
    y_numbers: Mapping[str, Tensor]
    x_learned: Sequence[str]
    y_learned: Sequence[str]
    p_learned: Sequence[str]
    parameters: Mapping[str, Any]
    symmetric: bool = False
    kernels: Kernels | None = None
    signature: str = ""
    vectors: Vectors | None = None
    affine: Affine = field(default_factory=dict)
    constant: frozenset[str] = frozenset()
    failure: Failure = field(kw_only=True)

    @property
    def counts(self) -> tuple[int, int]:
        """The number of this rank's rows, and of its columns."""
        return self.rows.counts[self.facts.rank], self.cols.counts[self.facts.rank]

    @property
    def row_terms(self) -> list[Reduced]:
        """The terms that rows read."""
        return [reduced for reduced in self.reduced if reduced.rows]

    @property
    def col_terms(self) -> list[Reduced]:
        """The terms that columns read."""
        return [reduced for reduced in self.reduced if reduced.cols]

    def sweep(
        self,
        x: Tensor,
        learned: Sequence[Tensor],
        y_learned: Sequence[Tensor],
        kept: Tensor | None,
        *,
        backward: bool = False,
    ) -> PairSweep:
        """Return a sweep of the local rows.

        Args:
            x: the local rows.
            learned: the numbers of local rows, then parameters, with a gradient.
            y_learned: the numbers of all columns with a gradient.
            kept: memory for products of the first tiles, or None.
            backward: whether gradients follow.
        """
        drivers, start = dict[str, Driver](), 0
        for name, width in self.widths.items():
            if self.vectors is not None:
                drivers[name] = token_driver(self.route, x, self.vectors, winners=backward, kept=kept)
                kept = None  # the driver itself keeps tiles
            else:
                drivers[name] = self.route.driver(x[:, start : start + width], 1.0)
            start += width
        learned_x, learned_p = learned[: len(self.x_learned)], learned[len(self.x_learned) :]
        device, offset = x.device, self.rows.offsets[self.facts.rank]
        numbers = {**self.x_numbers, **dict(zip(self.x_learned, learned_x, strict=True))}
        columns = {**self.y_numbers, **dict(zip(self.y_learned, y_learned, strict=True))}
        return PairSweep(
            self.kinds,
            drivers,
            self.reduced,
            Side(numbers, offset, device, self.x_learned),
            Side(columns, 0, device, self.y_learned),
            {**self.parameters, **dict(zip(self.p_learned, learned_p, strict=True))},
            self.p_learned,
            self.symmetric,
            self.kernels,
            self.signature,
            None if kept is None else KeptTiles(kept),
            self.affine,
            self.constant,
        )


class PairSums(torch.autograd.Function):
    """Reduce the matrix of pairs by rows and by columns: -> (terms of rows, b), (terms of columns, n_r)."""

    @staticmethod
    @no_autocast
    def forward(ctx: Any, plan: PairPlan, x: Tensor, y: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor]:
        exchange, wide = plan.route.exchange, wide_dtype(x.device)
        ctx.dtypes = x.dtype, y.dtype
        x, y = plan.route.products.rounded(x), plan.route.products.rounded(y)
        fetched = exchange.fetch(y)
        learned_x, learned_y, learned_p = _split(learned, plan)
        all_y = [plan.facts.all_gather(numbers, plan.cols) for numbers in learned_y]
        entries = plan.route.budget.kept if any(ctx.needs_input_grad) else 0
        kept_dtype = accumulation_dtype(x.dtype) if plan.vectors is None else plan.route.budget.kept_dtype
        kept = x.new_empty(entries, dtype=kept_dtype) if entries else None
        sweep = plan.sweep(x, [*learned_x, *learned_p], all_y, kept)
        kept_rows, kept_cols = (Kept([reduced.rule for reduced in some]) for some in (plan.row_terms, plan.col_terms))
        rows = kept_rows.start(plan.counts[0], wide, x.device)
        slices = kept_rows.slices, kept_cols.slices

        def visit(block: Block, columns: ColumnData) -> None:
            # Of a symmetric matrix, the sums of columns are those of rows, too: one accumulation has both.
            into = rows if columns.local is None else columns.local
            plan.failure.guard(lambda: sweep.forward(block, into, columns.accumulated, slices), lambda: None)

        initial = partial(kept_cols.start, dtype=wide, device=x.device) if plan.col_terms else None
        cols = exchange.accumulate(fetched, visit, initial=initial, op=kept_cols)
        local = x.new_zeros(plan.counts[1], 0, dtype=wide)
        if cols is not None:
            local = exchange.reduce(cols, kept_cols)[exchange.kept_local]
        if plan.symmetric:
            rows = local
        ctx.plan, ctx.slices = plan, slices
        ctx.save_for_backward(x, y, fetched, kept, rows, local, *learned, *all_y)
        col_results = (
            local.new_zeros(0, len(local)) if plan.symmetric else _results(plan.col_terms, local, kept_cols.slices)
        )
        return _results(plan.row_terms, rows, kept_rows.slices), col_results

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: PairPlan = ctx.plan
        x, y, fetched, kept, rows, cols, *rest = ctx.saved_tensors
        count = len(plan.x_learned) + len(plan.y_learned) + len(plan.p_learned)
        learned, all_y = rest[:count], rest[count:]
        learned_x, learned_y, learned_p = _split(learned, plan)
        sweep, dtype, wide = (
            plan.sweep(x, [*learned_x, *learned_p], all_y, kept, backward=True),
            accumulation_dtype(x.dtype),
            wide_dtype(x.device),
        )
        want_x, want_y = ctx.needs_input_grad[1:3]
        row_constants = _constants(plan.row_terms, rows, ctx.slices[0], grads[0])
        col_constants = row_constants if plan.symmetric else _constants(plan.col_terms, cols, ctx.slices[1], grads[1])
        carried = plan.route.exchange.distribute(torch.cat(col_constants)) if any(map(len, col_constants)) else None
        wants = want_x or want_y
        into = Gradients(
            torch.zeros_like(x, dtype=dtype) if want_x and not plan.symmetric else None,
            x.new_zeros(plan.counts[0], len(learned_x), dtype=wide),
            x.new_zeros(plan.cols.total, len(learned_y), dtype=wide),
            [torch.zeros_like(value, dtype=wide) for value in learned_p],
        )
        by_term, failure = _by_term(plan, row_constants, rows=True), Failure(plan.facts.comm, plan.facts.caller)

        def visit(block: Block, columns: ColumnData) -> None:
            numbers: list[Tensor] = []
            if columns.carried is not None:
                numbers = list(columns.carried.split([len(value) for value in col_constants]))
            sums = into if columns.local is None else into._replace(u=columns.local)  # rows are columns, too
            cols_by_term = _by_term(plan, numbers, rows=False)
            failure.guard(lambda: sweep.backward(block, by_term, cols_by_term, sums, columns.accumulated), lambda: None)

        v = plan.route.exchange.accumulate(
            fetched,
            visit,
            carried=carried,
            initial=zeros(y, y.shape[1], dtype) if want_y or (wants and plan.symmetric) else None,
            to_owner=True,
        )
        failure.report_after_backward()
        grad_x = None if into.u is None else into.u.to(ctx.dtypes[0])
        grad_y = None if v is None else v.to(ctx.dtypes[1])
        col_number_grads = into.col_number_grads
        if learned_y and plan.facts.comm.size > 1:
            col_number_grads = plan.facts.comm.reduce_scatter(col_number_grads, counts=plan.cols.counts, check=False)
        number_grads = [into.row_number_grads[:, column].to(value.dtype) for column, value in enumerate(learned_x)]
        number_grads += [col_number_grads[:, column].to(value.dtype) for column, value in enumerate(learned_y)]
        parameter_grads = [grad.to(value.dtype) for grad, value in zip(into.parameter_grads, learned_p, strict=True)]
        return None, grad_x, grad_y, *number_grads, *parameter_grads


def _split(learned: Sequence[Tensor], plan: PairPlan) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Return the numbers of rows, of columns, and the parameters."""
    first, second = len(plan.x_learned), len(plan.x_learned) + len(plan.y_learned)
    return learned[:first], learned[first:second], learned[second:]


def _results(reduced: Sequence[Reduced], kept: Tensor, slices: Sequence[slice]) -> Tensor:
    results = [term.rule.result(kept[:, part]) for term, part in zip(reduced, slices, strict=True)]
    return torch.stack(results) if results else kept.new_zeros(0, len(kept))


def _constants(reduced: Sequence[Reduced], kept: Tensor, slices: Sequence[slice], grads: Tensor) -> list[Tensor]:
    """Return the numbers that each term's rule needs of each row or column, (constants, k)."""
    none = kept.new_zeros(0, len(kept))
    return [
        term.rule.backward(kept[:, part], grad) if term.rule.constants else none
        for term, part, grad in zip(reduced, slices, grads, strict=True)
    ]


def _by_term(plan: PairPlan, numbers: Sequence[Tensor], *, rows: bool) -> list[Tensor]:
    """Return the numbers in the order of all terms; none for those that the side does not read."""
    remaining = iter(numbers)
    none = torch.empty(0, 0, device="cpu")
    return [next(remaining, none) if (term.rows if rows else term.cols) else none for term in plan.reduced]
