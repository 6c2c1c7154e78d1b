"""All of a small S as one matrix: a node for its products, and between these and their gradients plain PyTorch.

    rows, or tokens -> S -> masks and the reductions of all rows, or columns -> dS -> gradients of rows

Where all of a rank's S is small beside a tile, the time of a step is that of starting operations, and reductions by
autograd start a third of those that a sweep needs. They are computed in the precision of sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.normalize import normalized
from .._base.precision import wide_dtype
from ..contract import Facts
from ..exchange import ColumnData, zeros
from ..partition import Tile, tiles
from ..sweep import (
    NONE,
    Block,
    Diagonals,
    Driver,
    EqualIds,
    MaxSimDriver,
    NamedRows,
    Selection,
    Union,
    default_side,
)
from ..sweep.pairs import Entries
from .route import Layout, Route, Vectors, choose_route, token_driver
from .softmax_plan import Operands, SoftmaxPlan
from .towers import stacked

_BESIDE_A_TILE = 8  # entries of a tile of products for each entry of S, which has a few copies in float64
_SWEPT_BY_A_CPU = 4  # from a quarter of this size on, a CPU's sweep of a softmax is as fast
_FIELDS = frozenset({"sum", "target", "logits", "count"})  # of rows and columns, that are computed here


def fits(device: torch.device, rows: int, cols: int) -> bool:
    """Return whether S is not empty, and small beside a tile of products."""
    return 0 < rows * cols <= default_side(device) ** 2 // _BESIDE_A_TILE


def is_small(facts: Facts, layout: Layout, times: int = 1) -> bool:
    """Return whether so many times S is small, on one process that did not ask for tiles."""
    alone = facts.comm.size == 1 and facts.options.memory == "auto"
    return alone and fits(facts.device, times * layout.rows.total, layout.cols.total)


def matrix_of(facts: Facts, layout: Layout, x: Tensor, y: Tensor) -> Tensor | None:
    """Return the products of rows, (b, B); None unless S is small."""
    if not is_small(facts, layout):
        return None
    s: Tensor = Matrix.apply(choose_route(facts, layout, keep=False), None, (len(x), len(y)), x, y)
    return s


def has_matrix(facts: Facts, plan: SoftmaxPlan, operands: Operands) -> bool:
    """Return whether `statistics_of_matrix` computes a call, where nobody asks for kernels."""
    selection, towers, layout = plan.selection, operands.towers, operands.layout
    changed = (selection.ceiling, selection.guide, selection.transform)
    divided = (towers.stay_norms, towers.travel_norms, towers.stay_rows)
    if facts.options.kernel == "triton" or layout.replicated or selection.best_of > 1:
        return False
    if changed != (None,) * 3 or divided != (None,) * 3 or not _FIELDS.issuperset((*plan.rows, *plan.cols)):
        return False
    return is_small(facts, layout, _SWEPT_BY_A_CPU if facts.device.type == "cpu" else 1)


def statistics_of_matrix(
    facts: Facts, plan: SoftmaxPlan, operands: Operands, scale: Any, offsets: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the fields of rows, then those of columns, each in their order, as the node `softmax` does."""
    towers, layout = operands.towers, replace(operands.layout, symmetric=False)
    rows = stacked([operands.features[i] for i in towers.stays])
    rows = normalized(rows) if towers.normalize else rows
    cols = stacked([operands.features[i] for i in towers.travels]) if towers.travels else rows
    shape = len(rows), len(cols)
    s = Matrix.apply(choose_route(facts, layout, keep=False), None, shape, rows, cols) * scale
    if offsets is not None:
        s = s + offsets[:, None]
    others, left_out = _left_out(facts, plan.selection, shape)
    outputs = []
    for fields, dim in ((plan.rows, 1), (plan.cols, 0)):
        for name in fields:
            if name == "sum":
                outputs.append(log_sum_exp_of(s, left_out, dim))
                continue
            masked, mask = torch.ones_like(s) if name == "count" else s, others if name == "target" else left_out
            outputs.append((masked if mask is None else masked.masked_fill(mask, 0.0)).sum(dim))
    return tuple(outputs)


def log_sum_exp_of(x: Tensor, left_out: Tensor | None, dim: int) -> Tensor:
    """Return logsumexp over a dimension, without the entries of a mask; -inf, with gradient 0, where there is none."""
    value: Tensor = _LogSumExp.apply(x, left_out, dim)
    return value


class _LogSumExp(torch.autograd.Function):
    """Its gradient is exp(x - max) / sum, as `logsumexp` says: torch.logsumexp rounds it where x is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, left_out: Tensor | None, dim: int) -> Tensor:
        x = x if left_out is None else x.masked_fill(left_out, float("-inf"))
        weights, ctx.dim = x.softmax(dim), dim
        ctx.save_for_backward(weights if left_out is None else weights.masked_fill_(left_out, 0.0))
        return x.logsumexp(dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        return weights * grad.unsqueeze(ctx.dim), None, None


def _left_out(facts: Facts, selection: Selection, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Return the masks of entries that are no positives, and of those that are no candidates; None: all entries are."""
    pairs, made = selection.pairs, dict[Any, Tensor]()
    positive, excluded = (_mask(facts, entries, shape, made) for entries in (pairs.positive, pairs.excluded))
    others = torch.ones(shape, dtype=torch.bool, device=facts.device) if positive is None else ~positive
    if selection.over == "positives":
        return others, others
    if selection.over == "all":
        return others, excluded if excluded is None or positive is None else excluded & others
    return others, excluded if positive is None else positive if excluded is None else positive | excluded


def _mask(facts: Facts, entries: Entries, shape: tuple[int, int], made: dict[Any, Tensor]) -> Tensor | None:
    """Return a set of entries of all of S as a mask; None: it is empty. Those of diagonals are made once in a call."""
    if isinstance(entries, Union):
        masks = [mask for each in entries.sets if (mask := _mask(facts, each, shape, made)) is not None]
        return torch.stack(masks).any(0) if masks else None
    if isinstance(entries, EqualIds):
        mask, but = entries.rows[:, None] == entries.cols, _mask(facts, entries.but or NONE, shape, made)
        return mask if but is None else mask & ~but
    if isinstance(entries, NamedRows):
        return (torch.arange(shape[0], device=facts.device)[:, None, None] == entries.rows).any(2)
    assert isinstance(entries, Diagonals)
    everywhere = Tile(slice(0, shape[0]), slice(0, shape[1]))
    index = facts.once(("diagonals", entries.places, shape), lambda: entries.within(everywhere, facts.device))
    if index is None:
        return None
    if entries.places not in made:
        made[entries.places] = torch.zeros(shape, dtype=torch.bool, device=facts.device)
        made[entries.places][index] = True
    return made[entries.places]


class Matrix(torch.autograd.Function):
    """Compute products of the local rows with all columns, or late interaction, in the precision of sums: S, (b, B).

    Collective: the exchange of rows, or of tokens, and of their gradients.
    """

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any, route: Route, vectors: Vectors | None, shape: tuple[int, int], x: Tensor, y: Tensor
    ) -> Tensor:
        exchange = route.exchange
        ctx.route, ctx.vectors, ctx.dtypes = route, vectors, (x.dtype, y.dtype)
        x, y = route.products.rounded(x), route.products.rounded(y)
        fetched = exchange.fetch(y)
        driver = _driver(ctx, x, winners=route.budget.kept > 0 and any(ctx.needs_input_grad))
        s, winners = x.new_empty(shape, dtype=wide_dtype(x.device)), list[Tensor]()

        def visit(block: Block, columns: ColumnData) -> None:
            for tile in tiles(block.rows, block.cols, driver.side):
                part, factors = s[tile.rows, tile.cols], driver.factors(tile, block)
                if not isinstance(driver, MaxSimDriver):
                    part.copy_(driver.logits(tile, *factors))
                    continue
                driver.logits(tile, *factors, out=part)
                if driver.winners is not None:
                    winners.append(driver.winners)

        exchange.accumulate(fetched, visit)
        ctx.save_for_backward(x, y, fetched, *winners)
        return s

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        route, (x, y, fetched, *winners) = ctx.route, ctx.saved_tensors
        want_x, want_y = ctx.needs_input_grad[3:]
        driver, kept = _driver(ctx, x, winners=True), iter(winners)
        once = isinstance(driver, MaxSimDriver) and driver.adds_once
        lossy = driver.precision.gradient_dtype if ctx.vectors is None else None
        one_tile = once and route.comm.size == 1 and max(grad.shape) <= driver.side
        x_dtype, y_dtype = ctx.dtypes if one_tile else (driver.dtype, driver.dtype)
        grad, u = grad.to(driver.dtype), torch.zeros_like(x, dtype=x_dtype) if want_x else None

        def visit(block: Block, columns: ColumnData) -> None:
            for tile in tiles(block.rows, block.cols, driver.side):
                factors = driver.factors(tile, block)
                if isinstance(driver, MaxSimDriver):
                    driver.winners = next(kept, None)
                    if driver.winners is None:
                        driver.logits(tile, *factors)  # for its winners
                tile_grad = grad[tile.rows, tile.cols].contiguous()
                if lossy is not None:  # what it loses is added as well
                    lost = tile_grad - tile_grad.to(lossy).to(tile_grad.dtype)
                    driver.products(lost, tile, *factors, block, u, columns.accumulated)
                driver.products(tile_grad, tile, *factors, block, u, columns.accumulated)

        initial = zeros(y, y.shape[1], y_dtype) if want_y else None
        v = route.exchange.accumulate(fetched, visit, initial=initial, to_owner=True)
        gradients = (z if z is None else z.to(dtype) for z, dtype in zip((u, v), ctx.dtypes, strict=True))
        return None, None, None, *gradients


def _driver(ctx: Any, x: Tensor, *, winners: bool) -> Driver:
    """Return a driver of the local rows, or of their tokens."""
    if ctx.vectors is None:
        driver: Driver = ctx.route.driver(x, 1.0)
        return driver
    return token_driver(ctx.route, x, ctx.vectors, winners=winners)
