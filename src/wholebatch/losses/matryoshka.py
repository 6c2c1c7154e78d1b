"""Matryoshka: one contrastive loss for several leading parts of the features at once.

    S^l = scale n(X[:, :m_l]) n(Y[:, :m_l])^T          m_1 < m_2 < ..., n divides rows by their norms
    L   = sum_l w_l L(S^l)                             L: CLIP's loss, or InfoNCE's

The products of a part are those of the part before and a few features more: one sweep does all parts, with the
multiply-adds of the largest, one exchange of the features, one of their gradients (see `sweep.nested`). Norms are O(B)
numbers of plain PyTorch, which pass on their gradients. Where one shift does not do for the sums (scale 10^4), or where
norms exceed 1e100, each part has a sweep of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import check_flag, check_number, shown
from .._normalize import UNIT, normalize_rows
from .._precision import vector
from ..comm import Group
from ..exchange import ExchangeName
from ..kernels import Kernel
from ..sweep import Memory, Pairs, Selection
from ..sync import Sync
from ._cross_entropy import softplus
from ._door import LEAST, Agreement, LossModule, Options, Reduction, agree, eager
from ._nested import factors, least_of_pairs, norm_ratio, parts_at_once
from ._pairs import pairs_of_rows
from ._softmax import softmax_numbers, wanted
from ._towers import Towers


@eager
def matryoshka_loss(
    queries: Tensor,
    keys: Tensor,
    *,
    logit_scale: Tensor | float,
    dims: Sequence[int],
    dim_weights: Sequence[float] | None = None,
    symmetric: bool = True,
    normalize: bool = True,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    kernel: Kernel = "auto",
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
        normalize: divide each part of a row by its norm. False: parts are taken as they are.
        ids: (b_r,) integers; pairs with equal ids are no negatives of each other.
        weights: (b_r,), of the pairs, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": L_i of this rank's pairs; see :func:`wholebatch.functional.clip_loss`.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: "gather", "ring" or "auto", as there.
        memory: "flat", "auto" or bytes, as there; nothing is kept.
        kernel: who computes a tile, as there; kernels take 5 units, for they compute products three times. With
            bfloat16 features they round what all later parts' gradients add up to, once: half a percent of the gradient
            for parts of eight features and more. A part of very few, whose gradient all but cancels, drowns in that.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.matryoshka_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L, with the meaning of `sync` as in :func:`wholebatch.functional.clip_loss`.
    `backward` is called on every rank, with the same incoming gradient and in the same order as that of other losses;
    ranks that differ all raise ValueError.

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
        _check_flags(symmetric, normalize)
        settings = {"dims": list(dims), "dim_weights": dim_weights and list(dim_weights)}
        return {"settings": settings | {"symmetric": symmetric, "normalize": normalize}}

    agreed = agree(
        "matryoshka_loss",
        Options(group, sync, exchange, memory, reduction, kernel),
        scalars={"logit_scale": logit_scale},
        features={"queries": queries, "keys": keys},
        paired=("queries", "keys"),
        ids={"ids": (ids, "queries")},
        weights=(weights, "queries"),
        check=check,
        see=lambda: {
            LEAST: least_of_pairs(queries, keys, dims, normalize),
            **{name: norm_ratio(z, dims) for name, z in (("of queries", queries), ("of keys", keys)) if normalize},
        },
        judge=lambda seen: {"spread": max(seen.get("of queries", 1.0), seen.get("of keys", 1.0))},
        must_match=("settings",),
    )
    rows = agreed.rows["queries"]
    pairs = pairs_of_rows(rows.rows(agreed.rank), None if ids is None else agreed.ids("ids"), "excluded")
    # Widened once: the gradients by features and by norms meet before they are rounded.
    x, y = (agreed.inputs[name].to(agreed.dtype) for name in ("queries", "keys"))
    inverse = [factors(z, dims, agreed.dtype, normalize) for z in (x, y)]
    bound = UNIT if normalize else agreed.norms["queries"] * agreed.norms["keys"]
    found = parts_at_once(agreed, x, y, inverse, pairs, dims, symmetric, bound)
    if found is None:
        found = _part_by_part(agreed, x, y, normalize, pairs, dims, symmetric, bound)
    of_rows, targets, of_cols = found
    losses = softplus(of_rows - targets)
    if symmetric:
        losses = (losses + softplus(of_cols - targets)) / 2
    of_parts = vector([1.0] * len(dims) if dim_weights is None else dim_weights, losses.dtype, losses.device)
    return agreed.reduce(losses @ of_parts, rows.total)


def check_dims(dims: Sequence[int], dim_weights: Sequence[float] | None, width: int | None) -> None:
    """dims increase from 1 to width; there are as many weights, none negative, not all 0."""
    listed = list(dims) if isinstance(dims, Sequence) else dims
    if not isinstance(listed, list) or not listed or not all(type(m) is int for m in listed):
        raise ValueError(f"dims must be a sequence of integers, such as (64, 128, 256), got {shown(dims)}")
    if listed != sorted(set(listed)) or listed[0] < 1:
        raise ValueError(f"dims must be positive, increasing, and each of them once; got {listed}")
    if width is not None and listed[-1] > width:
        raise ValueError(f"dims must not exceed the feature size {width}, got {listed[-1]}")
    if dim_weights is None:
        return
    if not isinstance(dim_weights, Sequence) or len(dim_weights) != len(listed):
        raise ValueError(f"dim_weights must be as many numbers as dims, {len(listed)}, got {shown(dim_weights)}")
    for weight in dim_weights:
        if check_number("dim_weights", weight) < 0:
            raise ValueError(f"dim_weights must not be negative, got {weight}; leave the part out of dims")
    if not any(dim_weights):
        raise ValueError("dim_weights must not all be 0: no loss would be left")


def _check_flags(symmetric: object, normalize: object) -> None:
    check_flag("symmetric", symmetric)
    check_flag("normalize", normalize)


def _part_by_part(
    agreed: Agreement,
    x: Tensor,
    y: Tensor,
    normalize: bool,
    pairs: Pairs,
    dims: Sequence[int],
    symmetric: bool,
    bound: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with a sweep for each part."""
    found = []
    for m in dims:
        features = [normalize_rows(z[:, :m]) if normalize else z[:, :m] for z in (x, y)]
        rows, cols = softmax_numbers(
            agreed,
            (agreed.scalars["logit_scale"], agreed.inputs["logit_scale"]),
            features,
            towers=Towers(stays=(0,), travels=(1,)),
            stays=agreed.rows["queries"],
            travels=agreed.rows["queries"],
            selection=Selection(pairs),
            bound=bound,
            rows=wanted(),
            cols=wanted(target=False) if symmetric else (),
            beside_target=True,
        )
        assert rows is not None
        assert rows.target is not None
        found.append((rows.logsumexp, rows.target, rows.logsumexp if cols is None else cols.logsumexp))
    of_rows, targets, of_cols = (torch.stack(numbers, dim=1) for numbers in zip(*found, strict=True))
    return of_rows, targets, of_cols


class MatryoshkaLoss(LossModule):
    """A contrastive loss of several leading parts of the features, over the global batch.

    Args:
        dims, dim_weights, symmetric, normalize, reduction, group, sync, exchange, memory, kernel: as in
            :func:`wholebatch.functional.matryoshka_loss`.
    """

    def __init__(
        self,
        *,
        dims: Sequence[int],
        dim_weights: Sequence[float] | None = None,
        symmetric: bool = True,
        normalize: bool = True,
        reduction: Reduction = "mean",
        group: Group = None,
        sync: Sync = "mean",
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
        kernel: Kernel = "auto",
    ) -> None:
        check_dims(dims, dim_weights, None)
        _check_flags(symmetric, normalize)
        super().__init__(
            dims=tuple(dims),
            dim_weights=dim_weights and tuple(dim_weights),
            symmetric=symmetric,
            normalize=normalize,
            reduction=reduction,
            group=group,
            sync=sync,
            exchange=exchange,
            memory=memory,
            kernel=kernel,
        )

    @eager
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
