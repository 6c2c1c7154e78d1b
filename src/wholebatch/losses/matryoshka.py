"""Matryoshka: one contrastive loss for several leading parts of the features at once.

    S^l = scale n(X[:, :m_l]) n(Y[:, :m_l])^T          m_1 < m_2 < ..., n divides rows by their norms
    L   = sum_l w_l L(S^l)                             L: CLIP's loss, or InfoNCE's

The products of a part are those of the part before and a few features more: one sweep does all parts, with the
multiply-adds of the largest, one exchange of the features, one of their gradients (see `sweep.nested`). Norms are O(B)
numbers of plain PyTorch, which pass on their gradients. Where one shift does not do for the sums (scale 10^4), each
part has a sweep of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._checks import check_number
from .._once import once_differentiable
from .._precision import accumulation_dtype, wide_dtype
from ..comm import Communicator, Group
from ..exchange import Exchange, ExchangeName
from ..logsumexp import log_sum_exp, never_small, shared_shift, uncertified
from ..sweep import Block, Budget, Driver, Memory, NestedSweep, Pairs, Selection
from ..sync import Sync
from ._cross_entropy import softplus
from ._door import Agreement, LossModule, Options, Reduction, agree, eager
from ._pairs import pairs_of_rows
from ._softmax import softmax_numbers, wanted
from ._towers import EPS, UNIT, Towers, no_autocast


@eager
def matryoshka_loss(
    queries: Tensor,
    keys: Tensor,
    *,
    logit_scale: Tensor | float,
    dims: Sequence[int],
    dim_weights: Sequence[float] | None = None,
    symmetric: bool = True,
    normalise: bool = True,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
) -> Tensor:
    r"""CLIP's loss (or InfoNCE's) of the first m features of all ranks' rows, summed over several m.

    L = sum_l w_l CE(S^l, diagonal),    S^l = logit_scale n(Q[:, :m_l]) n(K[:, :m_l])^T,    n: rows of norm 1,
    where a symmetric CE is the mean of that of S and that of S^T.

    Args:
        queries: Q_r, (b_r, d), this rank's rows. b_r may differ between ranks and may be 0. float64, float32, bfloat16
            or float16.
        keys: K_r, (b_r, d); row i belongs to row i of Q_r.
        logit_scale: multiplies the similarities (1 / temperature); a number or a tensor of shape () or [1], the same
            on all ranks.
        dims: m_l, how many features each part has: increasing, from 1 to d.
        dim_weights: w_l, of the parts, >= 0; default 1 each.
        symmetric: both directions (CLIP), or that of the queries alone (InfoNCE).
        normalise: divide each part of a row by its norm. False: parts are taken as they are.
        ids: (b_r,) integers; pairs with equal ids are no negatives of each other.
        weights: (b_r,), of the pairs, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": L_i of this rank's pairs; see :func:`wholebatch.functional.clip_loss`.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: "gather", "ring" or "auto", as there.
        memory: "flat", "auto" or bytes, as there; nothing is kept.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.matryoshka_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L, with the meaning of `sync` as in :func:`wholebatch.functional.clip_loss`.
    `backward` is called on every rank, with the same incoming gradient.

    Work: 4 units of b_r B d multiply-adds per rank, whatever the number of parts, and an exponential per entry, part
    and pass. Memory beyond inputs and gradients: a tile for each part and three, and on several ranks what the
    exchange takes for Y. Collectives: as :func:`wholebatch.functional.clip_loss`.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also dims that are not increasing integers from 1 to d, weights of another number, negative or all 0.
        RuntimeError: if the gradient is differentiated again.

    Source: Kusupati et al., 2022, arXiv:2205.13147, equation 1.

    >>> import torch, wholebatch as wb
    >>> x = torch.eye(3)
    >>> wb.functional.matryoshka_loss(x, x, logit_scale=10.0, dims=(1, 3))
    tensor(0.7325)
    """

    def check() -> dict[str, Any]:
        check_dims(dims, dim_weights, queries.shape[1] if queries.dim() == 2 else None)
        return {"settings": [list(dims), None if dim_weights is None else list(dim_weights), symmetric, normalise]}

    agreed = agree(
        "matryoshka_loss",
        Options(group, sync, exchange, memory, reduction),
        scalars={"logit_scale": logit_scale},
        features={"queries": queries, "keys": keys},
        paired=("queries", "keys"),
        ids={"ids": (ids, "queries")},
        weights=(weights, "queries"),
        check=check,
        must_match=("settings",),
    )
    rows = agreed.rows["queries"]
    pairs = pairs_of_rows(rows.rows(agreed.rank), None if ids is None else agreed.ids("ids"), "excluded")
    # Widened once: the gradients by features and by norms meet before they are rounded.
    x, y = (agreed.inputs[name].to(agreed.dtype) for name in ("queries", "keys"))
    inverse = [_inverse_norms(z, dims, agreed.dtype, normalise) for z in (x, y)]
    found = _at_once(agreed, x, y, inverse, pairs, dims, symmetric, normalise)
    if found is None:
        found = _part_by_part(agreed, x, y, inverse, pairs, dims, symmetric, normalise)
    of_rows, targets, of_cols = found
    losses = softplus(of_rows - targets)
    if symmetric:
        losses = (losses + softplus(of_cols - targets)) / 2
    of_parts = losses.new_tensor([1.0] * len(dims) if dim_weights is None else list(dim_weights))
    return agreed.reduce(losses @ of_parts, rows.total)


def check_dims(dims: Sequence[int], dim_weights: Sequence[float] | None, width: int | None) -> None:
    """dims increase from 1 to width; there are as many weights, none negative, not all 0."""
    listed = list(dims) if isinstance(dims, Sequence) else dims
    if not isinstance(listed, list) or not listed or not all(type(m) is int for m in listed):
        raise ValueError(f"dims must be a sequence of integers, such as (64, 128, 256), got {dims!r}")
    if listed != sorted(set(listed)) or listed[0] < 1:
        raise ValueError(f"dims must be positive, increasing, and each of them once; got {listed}")
    if width is not None and listed[-1] > width:
        raise ValueError(f"dims must not exceed the feature size {width}, got {listed[-1]}")
    if dim_weights is None:
        return
    if len(dim_weights) != len(listed):
        raise ValueError(f"dim_weights must be as many as dims, {len(listed)}, got {len(dim_weights)}")
    for weight in dim_weights:
        if check_number("dim_weights", weight) < 0:
            raise ValueError(f"dim_weights must not be negative, got {weight}; leave the part out of dims")
    if not any(dim_weights):
        raise ValueError("dim_weights must not all be 0: no loss would be left")


def _inverse_norms(x: Tensor, dims: Sequence[int], dtype: torch.dtype, normalise: bool) -> Tensor:
    """1 / max(|x[:m]|, eps) for each m, (rows, parts)."""
    if not normalise:
        return torch.ones(len(x), len(dims), dtype=dtype, device=x.device)
    parts = x.to(dtype).split(_lengths(dims, x.shape[1]), dim=1)[: len(dims)]
    squares = torch.stack([part.square().sum(1) for part in parts], dim=1).cumsum(1)
    return squares.clamp(min=EPS**2).rsqrt()


def _lengths(dims: Sequence[int], width: int) -> list[int]:
    ends = [0, *dims, width]
    return [stop - start for start, stop in pairwise(ends)]


def _at_once(
    agreed: Agreement,
    x: Tensor,
    y: Tensor,
    inverse: Sequence[Tensor],
    pairs: Pairs,
    dims: Sequence[int],
    symmetric: bool,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """A of rows, T, and A of columns, (b, parts) each; None if one shift does not do."""
    rows, scale = agreed.rows["queries"], agreed.scalars["logit_scale"]
    bound = abs(scale) * (UNIT if normalise else agreed.norms["queries"] * agreed.norms["keys"])
    shift = shared_shift(bound, rows.total, agreed.dtype)
    if shift is None or not scale:  # the derivative by the scale is made of logits, divided by it
        return None
    how, budget = agreed.exchange(rows, rows, keep=False)
    plan = _Plan(agreed.comm, how, budget, pairs, tuple(dims), scale, shift, rows.total, symmetric)
    of_rows, targets, of_cols = _Nested.apply(plan, agreed.inputs["logit_scale"], *inverse, x, y)
    if not never_small(bound, shift, rows.total, agreed.dtype):
        with torch.no_grad():
            sums = [(side - shift).exp() + (targets - shift).exp() for side in (of_rows, of_cols)[: 1 + symmetric]]
            bad = torch.stack([uncertified(side, rows.total, agreed.dtype) for side in sums]).sum()
            if agreed.comm.all_reduce(bad.to(wide_dtype(x.device)), check=False).item():
                return None
    return of_rows, targets, of_cols


def _part_by_part(
    agreed: Agreement,
    x: Tensor,
    y: Tensor,
    inverse: Sequence[Tensor],
    pairs: Pairs,
    dims: Sequence[int],
    symmetric: bool,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with a sweep for each part."""
    found = []
    for part, m in enumerate(dims):
        features = [z[:, :m] * inverse[side][:, part : part + 1] for side, z in enumerate((x, y))]
        rows, cols = softmax_numbers(
            agreed,
            (agreed.scalars["logit_scale"], agreed.inputs["logit_scale"]),
            features,
            towers=Towers(stays=(0,), travels=(1,)),
            stays=agreed.rows["queries"],
            travels=agreed.rows["queries"],
            selection=Selection(pairs),
            bound=UNIT if normalise else agreed.norms["queries"] * agreed.norms["keys"],
            rows=wanted(),
            cols=wanted(target=False) if symmetric else (),
            beside_target=True,
        )
        assert rows is not None
        assert rows.target is not None
        found.append((rows.logsumexp, rows.target, rows.logsumexp if cols is None else cols.logsumexp))
    of_rows, targets, of_cols = (torch.stack(numbers, dim=1) for numbers in zip(*found, strict=True))
    return of_rows, targets, of_cols


@dataclass(frozen=True)
class _Plan:
    comm: Communicator
    exchange: Exchange
    budget: Budget
    pairs: Pairs
    dims: tuple[int, ...]
    scale: float
    shift: float
    size: int  # N, of the batch
    symmetric: bool

    def sweep(self, x: Tensor, inverse: Tensor) -> NestedSweep:
        driver = Driver(
            x,
            1.0,
            side=self.budget.side,
            largest=self.exchange.largest_block,
            buffers=3 + len(self.dims),
        )
        return NestedSweep(driver, self.pairs, self.dims, inverse, self.scale, self.shift)


class _Nested(torch.autograd.Function):
    """A of rows, T, and A of columns, (b, parts) each, from features and inverse norms."""

    @staticmethod
    @no_autocast
    def forward(
        ctx: Any, plan: _Plan, scale: Any, inverse_x: Tensor, inverse_y: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, parts = wide_dtype(x.device), len(plan.dims)
        held = plan.exchange.bring(torch.cat([y.to(inverse_y.dtype), inverse_y], dim=1))
        sweep = plan.sweep(x, inverse_x)
        of_rows, targets = (x.new_zeros(len(x), parts, dtype=wide) for _ in range(2))

        def visit(block: Block, _carried: Tensor | None, into: Tensor | None, _own: Tensor | None) -> None:
            sweep.sums(block, of_rows, targets, into)

        initial = x.new_zeros(1, parts, dtype=wide) if plan.symmetric else None
        of_cols = plan.exchange.collect(held, visit, initial=initial)
        if of_cols is not None:
            of_cols = plan.exchange.merge(of_cols, "sum")[plan.exchange.kept_own].clone()
        ctx.plan = plan
        scale = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(scale, inverse_x, inverse_y, x, y, held, of_rows, of_cols)
        sums = (of_rows, of_rows if of_cols is None else of_cols)
        lse_rows, lse_cols = (log_sum_exp(plan.shift, side) for side in sums)
        return lse_rows, targets, lse_cols

    # With of_rows_il = sum_j N dS^l_ij S^l_ij, and of_cols likewise,
    #
    #     d/d inverse norm of i, part l = of_rows_il / (N r_il)        d/dscale = 1 / (N scale) sum_il of_rows_il
    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: _Plan = ctx.plan
        scale, inverse_x, inverse_y, x, y, held, row_sums, col_sums = ctx.saved_tensors
        want_scale, _, _, want_x, want_y = ctx.needs_input_grad[1:]
        a, t, a_cols = (plan.size * grad for grad in grads)
        rows = torch.where(a == 0, 0.0, a / row_sums)
        carried = None
        if col_sums is not None:
            carried = plan.exchange.spread(torch.where(a_cols == 0, 0.0, a_cols / col_sums).T.contiguous())
        dtype, parts, d = accumulation_dtype(x.dtype), len(plan.dims), x.shape[1]
        sweep = plan.sweep(x, inverse_x)
        u = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if want_x else None
        of_rows = x.new_zeros(len(x), parts, dtype=wide_dtype(x.device))

        def visit(block: Block, carried: Tensor | None, into: Tensor | None, _own: Tensor | None) -> None:
            cols = None if carried is None else carried.T
            v, of_cols = (None, None) if into is None else (into[:, :d], into[:, d:])
            sweep.gradients(block, rows, t, cols, u, v, of_rows, of_cols)

        initial = x.new_zeros(1, d + parts, dtype=dtype) if want_y else None
        v = plan.exchange.collect(held, visit, carried=carried, initial=initial)
        grad_scale = None
        if want_scale:
            grad_scale = (of_rows.sum() / (plan.size * plan.scale)).to(scale).view_as(scale)
        grad_x = grad_y = grad_inverse_x = grad_inverse_y = None
        if u is not None:
            grad_x = u.div_(plan.size).to(x.dtype)
            grad_inverse_x = (of_rows / (plan.size * inverse_x)).to(inverse_x.dtype)
        if v is not None:
            v = plan.exchange.home(v).div_(plan.size)
            grad_y, grad_inverse_y = v[:, :d].to(y.dtype), v[:, d:] / inverse_y
        return None, grad_scale, grad_inverse_x, grad_inverse_y, grad_x, grad_y


class MatryoshkaLoss(LossModule):
    """A contrastive loss of several leading parts of the features, over the global batch.

    Args:
        dims, dim_weights, symmetric, normalise, reduction, group, sync, exchange, memory: as in
            :func:`wholebatch.functional.matryoshka_loss`.
    """

    def __init__(
        self,
        *,
        dims: Sequence[int],
        dim_weights: Sequence[float] | None = None,
        symmetric: bool = True,
        normalise: bool = True,
        reduction: Reduction = "mean",
        group: Group = None,
        sync: Sync = "mean",
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
    ) -> None:
        super().__init__(
            dims=dims,
            dim_weights=dim_weights,
            symmetric=symmetric,
            normalise=normalise,
            reduction=reduction,
            group=group,
            sync=sync,
            exchange=exchange,
            memory=memory,
        )
        check_dims(dims, dim_weights, None)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        *,
        logit_scale: Tensor | float,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.matryoshka_loss`: (b_r, d), (b_r, d), a scalar -> L."""
        return matryoshka_loss(queries, keys, logit_scale=logit_scale, ids=ids, weights=weights, **self.settings)
