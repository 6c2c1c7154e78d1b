"""Matryoshka: one contrastive loss of several leading parts of the features at once.

    S^l = scale n(X[:, :m_l]) n(Y[:, :m_l])^T          m_1 < m_2 < ..., n divides rows by their norms
    L   = sum_l w_l L(S^l)                             L: CLIP's loss, or InfoNCE's

The products of a part are those of the part before, plus some more features. So one sweep computes all parts, with the
multiply-adds of the largest, one exchange of the features, one of their gradients (see `sweep.nested`). The norms are
O(B) numbers, which plain PyTorch computes and differentiates. Where one shift underflows (scale 10^4), or where norms
exceed 1e100, each part has its own sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_flag, check_number, shown
from .._base.normalize import UNIT, normalize_rows
from .._base.precision import vector
from ..contract import (
    MIN_PAIR_PRODUCT,
    Checks,
    Facts,
    Inputs,
    KernelOptions,
    Options,
    Reduction,
    agree,
    entry,
    reduce_losses,
)
from ..logsumexp import softplus
from ..nodes import Bounds, Layout, Operands, Towers, row_statistics, statistics_fields
from ..nodes.nested import (
    NORM_RATIO,
    Parts,
    inverse_norms_of_parts,
    nested_statistics,
    norm_ratio,
    smallest_pair_product,
)
from ..sweep import Selection
from ._declaration import Declaration
from ._logit_scale import TakesLogitScale
from ._module import KernelLoss
from ._pairs import pairs_of_rows


@entry
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
    **options: Unpack[KernelOptions],
) -> Tensor:
    r"""Return CLIP's loss (or InfoNCE's) of the first m features of all ranks' rows, summed over several m.

    L = sum_l w_l CE(S^l, diagonal),    S^l = logit_scale n(Q[:, :m_l]) n(K[:, :m_l])^T,    n: rows of norm 1,
    where CE is the cross-entropy of S, or if `symmetric` the mean of those of S and S^T.

    Args:
        queries: Q_r, (b_r, d), this rank's rows. b_r may differ between ranks and may be 0. float64, float32, bfloat16
            or float16.
        keys: K_r, (b_r, d); row i belongs to row i of Q_r.
        logit_scale: multiplies the similarities (1 / temperature); a number or a tensor of shape () or [1], the same
            on all ranks.
        dims: m_l, the number of features of each part: increasing, from 1 to d.
        dim_weights: w_l, one for each part, >= 0; default 1.
        symmetric: True for both directions (CLIP), False for that of the queries alone (InfoNCE).
        normalize: divide each part of a row by its norm. False: parts are used as they are.
        ids: (b_r,) integers; pairs with equal ids are not negatives of each other.
        weights: (b_r,), one for each pair, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": L_i of this rank's pairs; see :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`.
            Nothing is kept. Kernels take 5 units, because they compute products three times.
            With bfloat16 features they round the sum of all later parts' gradients once: half a percent of the gradient
            for parts of eight features and more. The gradient of a part of very few features almost cancels, and is
            lost in this error.

    Returns:
        L, the same on every rank: `wholebatch.reference.matryoshka_loss` of the whole batch, at least in float32.

    Collectives: those of :func:`wholebatch.functional.clip_loss`. Work: 4 units of b_r B d multiply-adds per rank,
    whatever the number of parts, and an exponential per entry, part and pass. Memory beyond inputs and gradients: a
    tile for each part and three more, and on several ranks the exchange's memory for Y.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for dims that are not increasing integers from 1 to d, and dim_weights that are not one for each of
            dims, negative, or all 0.
        RuntimeError: if the gradient is differentiated again.

    Source: Kusupati et al., 2022, arXiv:2205.13147, equation 1.

    >>> import torch, wholebatch as wb
    >>> x = torch.eye(3)
    >>> wb.functional.matryoshka_loss(x, x, logit_scale=10.0, dims=(1, 3))
    tensor(0.7325)
    """

    def check() -> dict[str, Any]:
        _check(dims, dim_weights, symmetric, normalize, queries.shape[1] if queries.dim() == 2 else None)
        settings = {"dims": list(dims), "dim_weights": dim_weights and list(dim_weights)}
        return {"settings": settings | {"symmetric": symmetric, "normalize": normalize}}

    facts = agree(
        "matryoshka_loss",
        Options(reduction=reduction, **options),
        Inputs(
            features={"queries": queries, "keys": keys},
            scalars={"logit_scale": logit_scale},
            ids={"ids": (ids, "queries")},
            weights=(weights, "queries"),
            paired=("queries", "keys"),
        ),
        Checks(
            check,
            read_back=lambda: {
                MIN_PAIR_PRODUCT: smallest_pair_product(queries, keys, dims, normalize),
                **{name: norm_ratio(z, dims) for name, z in (("of queries", queries), ("of keys", keys)) if normalize},
            },
            derive=lambda numbers: {NORM_RATIO: max(numbers.get("of queries", 1.0), numbers.get("of keys", 1.0))},
            must_match=("settings",),
            reads="the norms of a row's parts decide how they are computed",
        ),
    )
    rows = facts.rows["queries"]
    pairs = pairs_of_rows(rows.rows(facts.rank), None if ids is None else facts.all_ids("ids"), "excluded")
    # Widened once: the gradients by features and by norms meet before they are rounded.
    x, y = (facts.inputs[name].to(facts.dtype) for name in ("queries", "keys"))
    inverse = [inverse_norms_of_parts(z, dims, facts.dtype, normalize) for z in (x, y)]
    bound = UNIT if normalize else facts.norms["queries"] * facts.norms["keys"]
    parts = Parts(tuple(dims), pairs, bound, symmetric=symmetric, normalize=normalize)
    statistics = nested_statistics(facts, (x, y), inverse, parts)
    lse_rows, targets, lse_cols = _part_by_part(facts, (x, y), parts) if statistics is None else statistics
    losses = softplus(lse_rows - targets)
    if symmetric:
        losses = (losses + softplus(lse_cols - targets)) / 2
    part_weights = vector([1.0] * len(dims) if dim_weights is None else dim_weights, losses.dtype, losses.device)
    return reduce_losses(facts, losses @ part_weights, rows.total)


def _check(
    dims: Sequence[int],
    dim_weights: Sequence[float] | None,
    symmetric: bool,
    normalize: bool,
    width: int | None = None,
) -> None:
    """Raise ValueError unless dims increase from 1 to `width`, with as many weights, none negative and not all 0."""
    check_flag("symmetric", symmetric)
    check_flag("normalize", normalize)
    listed = list(dims) if isinstance(dims, Sequence) else dims
    if not isinstance(listed, list) or not listed or not all(type(m) is int for m in listed):
        raise ValueError(f"dims must be a sequence of integers, such as (64, 128, 256), got {shown(dims)}")
    if listed != sorted(set(listed)) or listed[0] < 1:
        raise ValueError(f"dims must be positive, increasing, and each of them once; got {listed}")
    if width is not None and listed[-1] > width:
        raise ValueError(f"dims must not exceed the embedding size {width}, got {listed[-1]}; leave that part out")
    if dim_weights is None:
        return
    if not isinstance(dim_weights, Sequence) or len(dim_weights) != len(listed):
        raise ValueError(f"dim_weights must be as many numbers as dims, {len(listed)}, got {shown(dim_weights)}")
    for weight in dim_weights:
        if check_number("dim_weights", weight) < 0:
            raise ValueError(f"dim_weights must not be negative, got {weight}; leave the part out of dims")
    if not any(dim_weights):
        raise ValueError(f"dim_weights must not all be 0, got {shown(dim_weights)}; no loss would be left")


def _part_by_part(facts: Facts, towers: tuple[Tensor, Tensor], parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `nested_statistics`, from one sweep for each part."""
    sides, rows = [], facts.rows["queries"]
    for m in parts.dims:
        features = [normalize_rows(z[:, :m]) if parts.normalize else z[:, :m] for z in towers]
        x_side, y_side = row_statistics(
            facts,
            (facts.scalars["logit_scale"], facts.inputs["logit_scale"]),
            Operands(features, Towers(stays=(0,), travels=(1,)), Layout(rows, rows)),
            Selection(parts.pairs),
            Bounds(parts.bound, add_positive=1.0),
            rows=statistics_fields(),
            cols=statistics_fields(target=False) if parts.symmetric else (),
        )
        assert x_side is not None
        assert x_side.target is not None
        sides.append((x_side.logsumexp, x_side.target, x_side.logsumexp if y_side is None else y_side.logsumexp))
    lse_rows, targets, lse_cols = (torch.stack(values, dim=1) for values in zip(*sides, strict=True))
    return lse_rows, targets, lse_cols


class MatryoshkaLoss(TakesLogitScale, KernelLoss, check=_check):
    """Matryoshka over the global batch: the settings of :func:`wholebatch.functional.matryoshka_loss`.

    Args:
        logit_scale: default for calls that leave it out, as in :class:`wholebatch.CLIPLoss`.
    """

    dims: Sequence[int]
    dim_weights: Sequence[float] | None = None
    symmetric: bool = True
    normalize: bool = True

    @entry
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        *,
        logit_scale: Tensor | float | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.matryoshka_loss`: (b_r, d), (b_r, d), a scalar -> L."""
        settings = self._settings_of_call(logit_scale=logit_scale)
        return matryoshka_loss(queries, keys, ids=ids, weights=weights, **settings)


DECLARATION = Declaration(
    matryoshka_loss, MatryoshkaLoss, settings=lambda size: {"dims": sorted({max(1, size // n) for n in (8, 4, 2, 1)})}
)
