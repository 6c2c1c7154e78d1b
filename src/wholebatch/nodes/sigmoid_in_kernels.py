"""The sigmoid node in kernels, where the positives are one diagonal: the formulas of `sigmoid` in a few launches.

    forward     dS of a tile -> the sums of its rows' losses and of its rows -> U and V by two products each
    backward    U and V, with the terms of the positives -> dX, dY and <X, U>

A positive's logit S_ii is a product of two rows, in float32, its loss log(1 + exp(-S_ii)), its entry of dS
-w_i sigmoid(-S_ii). Without weights dS is at most 1, so that its unit in float16 is a number that the host knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .._base.autograd import no_autocast, once_differentiable
from ..comm.inside import all_reduce, reduce_scatter
from ..contract import Facts
from ..logsumexp import softplus
from ..sweep import LARGEST
from .in_kernels import InKernels, TileOfS, one_diagonal
from .kernel_check import random_numbers, use_kernels
from .rehearsals import NodeCall, NodeRehearsal, moderate_scale
from .route import Layout, Route, choose_route, unit_of_gradients
from .sigmoid import Sigmoid, SigmoidPlan

_BIAS = -4.0  # of a rehearsal


@dataclass(eq=False)
class _Form:
    """The facts of a form that all of its calls share."""

    tiles: InKernels  # of S
    in_units: bool  # whether dS is written to float16, in units
    factor: float  # by which the kernel multiplies dS if the caller gave no weights
    factors: Tensor | None  # this number for each row, (b,), if it is not 1


@dataclass(eq=False)
class _Gradients:
    """G Y and G^T X of the negatives' G = dL/dS, the positives' -G_ii, and the sum of all G, each in units."""

    # u, v: the products
    u: Tensor | None
    v: Tensor | None
    terms: Tensor  # -G_ii / factor
    bias: Tensor | None  # the sum of the local rows of G, or None
    unit: Tensor | float  # the unit of u, v and bias
    factor: float  # of terms


def sigmoid_losses(facts: Facts, plan: SigmoidPlan, layout: Layout, x: Tensor, y: Tensor) -> Tensor:
    """Return a rank's share of L, or the l_i of its rows. Collective. The plan is in kernels if they may compute it."""
    inputs, products, weights = facts.inputs, facts.products, facts.inputs["weights"]
    bias = inputs["logit_bias"]
    plan = choose_kernels(facts, plan, layout, bias, weighted=weights is not None)
    weights = None if plan.per_row or weights is None else weights.to(facts.device)
    arguments = inputs["logit_scale"], bias, weights, x, y
    if plan.in_kernels:
        name = "sigmoid in kernels", products.precision, products.units, facts.features_dtype
        shared = facts.once(name, lambda: _form(facts, plan, layout, x, weights))
        if shared is not None:
            return SigmoidInKernels.apply(plan, shared, facts.row_numbers, *arguments)
    return Sigmoid.apply(plan, *arguments)[0]


def choose_kernels(facts: Facts, plan: SigmoidPlan, layout: Layout, bias: Any, *, weighted: bool) -> SigmoidPlan:
    """Return the plan, in kernels if they passed their check. Collective at a form's first call."""
    if not plan.in_kernels:
        return plan
    weighted = weighted and not plan.per_row
    in_units = facts.products.needs_unit(facts.features_dtype, in_kernels=True)
    learned = isinstance(bias, Tensor) and bias.requires_grad

    def node(route: Route, x: Tensor, y: Tensor, in_kernels: bool) -> NodeCall:
        alone = replace(plan, route=route, scale=moderate_scale(x.shape[1]), bias=_BIAS, in_kernels=in_kernels)
        weights = random_numbers(len(x), facts.device, 2) if weighted else None
        leaves = [z.requires_grad_(plan.differentiable) for z in (x, y)]
        rehearsed_bias = (
            torch.full_like(bias, _BIAS).requires_grad_() if isinstance(bias, Tensor) and learned else _BIAS
        )
        arguments = alone, alone.scale, rehearsed_bias, weights, *leaves
        return [*leaves, *([rehearsed_bias] if isinstance(rehearsed_bias, Tensor) else [])], lambda: [
            Sigmoid.apply(*arguments)[0]
        ]

    form = (*plan.pairs.kinds, weighted or plan.per_row or in_units, learned, plan.per_row)
    if use_kernels(facts, form, layout, lambda: NodeRehearsal(facts, plan.route, layout, facts.features_dtype, node)):
        return plan
    return replace(plan, route=choose_route(facts.with_(kernels=False), layout, keep=False), in_kernels=False)


def _form(facts: Facts, plan: SigmoidPlan, layout: Layout, x: Tensor, weights: Tensor | None) -> _Form | None:
    """Return the facts of this node if it computes calls of this form, else None: the same on all ranks."""
    tiles = None if plan.per_row else one_diagonal(facts, plan.route, plan.pairs, layout, x.dtype)
    if tiles is None:
        return None
    in_units = plan.route.products.needs_unit(x.dtype, in_kernels=True)
    if not in_units or weights is not None:
        return _Form(tiles, in_units, 1.0, None)
    return _Form(tiles, in_units, LARGEST, x.new_full((x.shape[0],), LARGEST, dtype=torch.float32))


class SigmoidInKernels(torch.autograd.Function):
    """Compute a rank's share of L from X, Y and weights, if any."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any,
        plan: SigmoidPlan,
        form: _Form,
        row_numbers: kernels.RowNumbers | None,
        scale: Any,
        bias: Any,
        weights: Tensor | None,
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        tiles = form.tiles
        read, local = kernels.laid_out(x.to(tiles.dtype)), kernels.laid_out(y.to(tiles.dtype))
        products = tiles.products_of(read, local, row_numbers, x.dtype)
        want_scale, want_bias, _, want_x, want_y = ctx.needs_input_grad[3:] if plan.differentiable else (False,) * 5
        losses, gradients = _sweep(
            plan, form, (read, local, products), weights, (want_scale, want_bias, want_x, want_y)
        )
        ctx.plan, ctx.form, ctx.gradients, ctx.dtypes = plan, form, gradients, (x.dtype, y.dtype)
        scale, bias = (value if isinstance(value, Tensor) else None for value in (scale, bias))
        ctx.save_for_backward(scale, bias, weights, read, local, products, losses)
        return losses.sum() if weights is None else (weights * losses).sum()

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        plan: SigmoidPlan = ctx.plan
        scale, bias, weights, x, y, products, losses = ctx.saved_tensors
        want_scale, want_bias, want_weights, want_x, want_y = ctx.needs_input_grad[3:]
        saved: _Gradients | None
        saved, ctx.gradients = ctx.gradients, None
        if saved is None:
            _, saved = _sweep(plan, ctx.form, (x, y, products), weights, (want_scale, want_bias, want_x, want_y))
        in_units = grad * saved.unit
        terms, unit, shares = saved.terms * in_units, in_units.float(), None
        gradients: list[Tensor | None] = []
        for name, own, other, needed, dtype in (("u", x, y, want_x, ctx.dtypes[0]), ("v", y, x, want_y, ctx.dtypes[1])):
            gradient, product = None, getattr(saved, name)
            setattr(saved, name, None)  # so that U is freed before dY is made
            if product is not None:
                pairs = other, terms, -saved.factor
                gradient, shares = kernels.row_gradient(product, own, pairs, None, unit, plan.scale, dtype)
            gradients.append(gradient if needed else None)
        grad_scale = shares.sum().to(scale).view_as(scale) if want_scale and shares is not None else None
        grad_bias = (saved.bias * in_units).to(bias).view_as(bias) if want_bias and saved.bias is not None else None
        grad_weights = (grad * losses).to(weights) if want_weights else None
        return None, None, None, grad_scale, grad_bias, grad_weights, *gradients


def _sweep(
    plan: SigmoidPlan,
    form: _Form,
    rows: tuple[Tensor, Tensor, Tensor],
    weights: Tensor | None,
    needed: tuple[bool, ...],
) -> tuple[Tensor, _Gradients]:
    """Return the local rows' l_i, and what the backward pass multiplies, from rows and their products."""
    want_bias, comm = needed[1], plan.route.comm
    x, y, products = rows
    by_row, unit = (form.factors, 1 / form.factor) if weights is None else _weights_in_units(plan, form, weights)
    u, v, sums = _tiles(plan, form, (x, y), by_row, needed)
    if v is not None and comm.size > 1:
        v = reduce_scatter(comm, v, plan.route.exchange.columns.counts)
    opposed = products.double().mul_(-plan.scale).sub_(plan.bias)  # minus the logits
    losses, terms, bias_grad = softplus(opposed), opposed.sigmoid_(), None
    if weights is not None and by_row is not None:
        terms.mul_(by_row)
    if sums is not None:
        summed = sums.sum(1, dtype=torch.float64).unbind()
        losses += summed[0]
        if want_bias:
            bias_grad = torch.sub(summed[1], terms, alpha=form.factor).sum()
    elif want_bias:  # this rank has no rows
        bias_grad = terms.sum()
    return losses, _Gradients(u, v, terms, bias_grad, unit, form.factor)


def _tiles(
    plan: SigmoidPlan, form: _Form, rows: tuple[Tensor, Tensor], weights: Tensor | None, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dS Y and dS^T X, where needed, and the sums of losses and of dS; None if this rank has no rows."""
    (x, local), tiles, (want_scale, want_bias, want_x, want_y) = rows, form.tiles, needed
    numbers = kernels.numbers_of(plan.scale, plan.bias, x.device)
    y = plan.route.exchange.fetch(local)
    sums: Tensor | None = None

    def write(launch: TileOfS, grad: Tensor | None) -> None:
        nonlocal sums
        tile, inputs = launch.tile, tiles.inputs(launch, x, y, numbers)
        if sums is None:
            sums = kernels.sigmoid_sums(x.shape[0], inputs, weighted=weights is not None, totals=want_bias)
        tile_weights = None if weights is None else weights[tile.rows]
        kernels.add_sigmoid(sums[..., tile.rows], inputs, grad, weights=tile_weights, add=tile.cols.start > 0)

    want_x = want_x or (want_scale and not want_y)
    if want_x or want_y:
        return *tiles.products(plan.route, x, y, (want_x, want_y), write), sums
    for launch in tiles.sums:
        write(launch, None)
    return None, None, sums


def _weights_in_units(plan: SigmoidPlan, form: _Form, weights: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return weights in units, float32, and their unit, the same on all ranks."""
    if not form.in_units:
        return weights.float().contiguous(), 1.0
    largest = weights.abs().amax() if weights.shape[0] else weights.new_zeros(())
    unit = unit_of_gradients(all_reduce(plan.route.comm, largest, "max"))
    return (weights / unit).float().contiguous(), unit
