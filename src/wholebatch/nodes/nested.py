"""Statistics of the rows and columns of several nested S, as one autograd node.

    S^l = scale diag(r^l) X[:, :m_l] Y[:, :m_l]^T diag(c^l)        r^l, c^l: 1 / norms of the first m_l features
    A^l_i = logsumexp over row i's negatives of S^l,    T^l_i = S^l_ii,    and A of columns

One sweep computes all parts (see `sweep.nested`), with one exchange of the features and one of their gradients. The
inverse norms are inputs of the node, with their own gradients; plain PyTorch propagates these to the features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.normalize import LONGEST, divisors, inverse_norms, known_norms, part_sizes
from .._base.precision import accumulation_dtype, paired_products, wide_dtype
from ..contract import Facts
from ..exchange import ColumnData, zeros
from ..kernels import exact
from ..logsumexp import log_sum_exp, shared_shift
from ..sweep import Block, KernelNestedSweep, NestedSweep, Pairs
from .kernel_check import use_kernels
from .rehearsals import SHIFT, NodeCall, NodeRehearsal, moderate_scale
from .route import Layout, Route, choose_route
from .shifts import no_underflow
from .softmax_plan import LogitBounds

NORM_RATIO = "largest ratio of norms"  # of parts of a row: a fact of each rank
# Kernels subtract a part's gradient from that of all parts, which may be larger by up to the square of this ratio.
_MAX_NORM_RATIO = 32.0


@dataclass(frozen=True)
class Parts:
    """The nested matrices of one call."""

    dims: tuple[int, ...]  # m_l, the number of leading features of each part, increasing
    pairs: Pairs  # the positives and the excluded entries, the same for all parts
    bound: float  # upper bound of the similarities of all parts
    symmetric: bool  # whether columns have statistics as well
    normalize: bool  # whether each part of a row is divided by its norm


@dataclass(frozen=True)
class NestedPlan:
    """The facts that the forward and the backward pass of one call share."""

    route: Route  # the exchange of Y's rows, and the memory of tiles
    parts: Parts  # the nested matrices
    scale: float  # of S
    shift: float  # of exponentials
    size: int  # N, the size of the batch
    # kernel_dtype: of the features as they were given, where kernels compute the tiles; None: plain PyTorch does
    kernel_dtype: torch.dtype | None

    def sweep(self, x: Tensor, inverse: Tensor) -> NestedSweep:
        """Return a sweep of X's rows, with the inverse norms of their parts."""
        driver = self.route.driver(x, 1.0)
        arguments = (driver, self.parts.pairs, self.parts.dims, inverse, self.scale, self.shift)
        if self.kernel_dtype is not None:
            return KernelNestedSweep(*arguments, self.route.exchange.columns.total, self.kernel_dtype)
        return NestedSweep(*arguments)


def inverse_norms_of_parts(x: Tensor, dims: Sequence[int], dtype: torch.dtype, normalize: bool) -> Tensor:
    """Return the factor of each part of a row, (rows, parts): 1 / max(|x[:m]|, eps), or 1 without `normalize`."""
    if normalize:
        return inverse_norms(x, dims, dtype)
    return torch.ones(len(x), len(dims), dtype=dtype, device=x.device)


@torch.no_grad()
def smallest_pair_product(x: Tensor, y: Tensor, dims: Sequence[int], normalize: bool) -> Tensor:
    """Return the smallest similarity of a row of x with its row of y in any part, shape (); infinity without rows."""
    if not len(x):
        return torch.full((), float("inf"), device=x.device)
    dtype = accumulation_dtype(x.dtype)
    parts = zip(*(z.split(part_sizes(dims, z.shape[1]), dim=1)[: len(dims)] for z in (x, y)), strict=True)
    products = torch.stack([paired_products(a, b) for a, b in parts], dim=1).cumsum(1)
    for z in (x, y):
        products.mul_(inverse_norms_of_parts(z, dims, dtype, normalize))
    return products.nan_to_num_(-math.inf, math.inf, -math.inf).amin()  # overlong rows have no known bound


@torch.no_grad()
def norm_ratio(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the largest ratio of norms of a row's longest and shortest part, shape (); 1 without rows."""
    if not len(x):
        return torch.ones((), device=x.device)
    norms = torch.cat([known_norms(x[:, :m]) for m in (dims[0], dims[-1])], dim=1)
    return (divisors(norms[:, 1]) / divisors(norms[:, 0])).amax()


def nested_statistics(
    facts: Facts, towers: tuple[Tensor, Tensor], inverse: Sequence[Tensor], parts: Parts
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return A of rows, T, and A of columns, (b, parts) each, computed in one sweep over "queries" and "keys".

    Return None if one shift underflows, or if products of long rows overflow before they are divided by norms.
    """
    rows, scale = facts.rows["queries"], facts.scalars["logit_scale"]
    bound = abs(scale) * parts.bound
    shift = shared_shift(bound, rows.total, facts.dtype)
    if shift is None or not scale:  # the derivative by the scale divides logits by it
        return None
    if max(facts.norms.values()) > LONGEST[facts.dtype]:
        return None
    if max(facts.of_ranks(NORM_RATIO)) > _MAX_NORM_RATIO:
        facts = replace(facts, kernels=False)
    layout = Layout(rows, rows)
    dtype = facts.products.dtype_in_kernels(facts.inputs["queries"].dtype) if facts.kernels else None
    shift = shift if dtype is None else exact(shift)
    plan = NestedPlan(choose_route(facts, layout, keep=False), parts, scale, shift, rows.total, dtype)
    form = (parts.dims, *parts.pairs.kinds, parts.symmetric)

    def node(route: Route, x: Tensor, y: Tensor, in_kernels: bool) -> NodeCall:
        alone = replace(plan, route=route, scale=moderate_scale(x.shape[1]), shift=SHIFT)
        alone = alone if in_kernels else replace(alone, kernel_dtype=None)
        inverse = [inverse_norms(z, parts.dims, accumulation_dtype(z.dtype)) for z in (x, y)]
        leaves = [z.requires_grad_(facts.differentiable) for z in (x, y)]
        return leaves, lambda: _Nested.apply(alone, alone.scale, *inverse, *leaves)

    def rehearsal() -> NodeRehearsal:
        return NodeRehearsal(facts, plan.route, layout, facts.inputs["queries"].dtype, node)

    if dtype is not None and not use_kernels(facts, form, layout, rehearsal):
        route = choose_route(replace(facts, kernels=False), layout, keep=False)
        plan = replace(plan, route=route, kernel_dtype=None)
    row_lse, targets, col_lse = _Nested.apply(plan, facts.inputs["logit_scale"], *inverse, *towers)
    min_pair = scale * facts.min_pair_product if scale > 0 else None
    bounds = LogitBounds(bound, min_pair, 1.0, rows.total)
    if not bounds.exclude_underflow(shift, facts.dtype):
        with torch.no_grad():
            sides = (row_lse, col_lse)[: 1 + parts.symmetric]
            sums = [(side - shift).exp() + (targets - shift).exp() for side in sides]
            if not no_underflow(facts.comm, sums, rows.total, facts.dtype):
                return None
    return row_lse, targets, col_lse


class _Nested(torch.autograd.Function):
    """Compute A of rows, T, and A of columns, (b, parts) each, from features and inverse norms."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any, plan: NestedPlan, scale: Any, inverse_x: Tensor, inverse_y: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, parts = wide_dtype(x.device), len(plan.parts.dims)
        fetched = plan.route.exchange.fetch(torch.cat([y.to(inverse_y.dtype), inverse_y], dim=1))
        sweep = plan.sweep(x, inverse_x)
        row_sums, targets = (x.new_zeros(len(x), parts, dtype=wide) for _ in range(2))

        def visit(block: Block, columns: ColumnData) -> None:
            sweep.sums(block, row_sums, targets, columns.accumulated)

        initial = zeros(x, parts, wide) if plan.parts.symmetric else None
        col_sums = plan.route.exchange.accumulate(fetched, visit, initial=initial)
        if col_sums is not None:
            col_sums = plan.route.exchange.reduce(col_sums, "sum")[plan.route.exchange.kept_local].clone()
        ctx.plan = plan
        scale = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(scale, inverse_x, inverse_y, x, y, fetched, row_sums, col_sums)
        sums = (row_sums, row_sums if col_sums is None else col_sums)
        lse_rows, lse_cols = (log_sum_exp(plan.shift, side) for side in sums)
        return lse_rows, targets, lse_cols

    # With products_il = sum_j N dS^l_ij S^l_ij, and col_products for columns,
    #
    #     d/d inverse norm of i, part l = products_il / (N r_il)        d/dscale = 1 / (N scale) sum_il products_il
    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: NestedPlan = ctx.plan
        scale, inverse_x, inverse_y, x, y, fetched, row_sums, col_sums = ctx.saved_tensors
        want_scale, _, _, want_x, want_y = ctx.needs_input_grad[1:]
        a, t, a_cols = (plan.size * grad for grad in grads)
        rows = torch.where(a == 0, 0.0, a / row_sums)
        carried = None
        if col_sums is not None:
            carried = plan.route.exchange.distribute(torch.where(a_cols == 0, 0.0, a_cols / col_sums).T.contiguous())
        dtype, parts, d = accumulation_dtype(x.dtype), len(plan.parts.dims), x.shape[1]
        sweep = plan.sweep(x, inverse_x)
        u = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if want_x else None
        row_products = x.new_zeros(len(x), parts, dtype=wide_dtype(x.device))

        def visit(block: Block, columns: ColumnData) -> None:
            cols = None if columns.carried is None else columns.carried.T
            v, col_products = None, None
            if columns.accumulated is not None:
                v, col_products = columns.accumulated[:, :d], columns.accumulated[:, d:]
            sweep.gradients(block, rows, t, cols, u, v, row_products, col_products)

        initial = zeros(x, d + parts, dtype) if want_y else None
        v = plan.route.exchange.accumulate(fetched, visit, carried=carried, initial=initial, to_owner=True)
        grad_scale = None
        if want_scale:
            grad_scale = (row_products.sum() / (plan.size * plan.scale)).to(scale).view_as(scale)
        grad_x = grad_y = grad_inverse_x = grad_inverse_y = None
        if u is not None:
            grad_x = u.div_(plan.size).to(x.dtype)
            grad_inverse_x = (row_products / (plan.size * inverse_x)).to(inverse_x.dtype)
        if v is not None:
            v.div_(plan.size)
            grad_y, grad_inverse_y = v[:, :d].to(y.dtype), v[:, d:] / inverse_y
        return None, grad_scale, grad_inverse_x, grad_inverse_y, grad_x, grad_y
