"""CLIP: symmetric softmax cross-entropy over the global batch, exact on any number of ranks, flat in memory.

    S_ij = scale x_i . y_j + bias          i, j = 1 ... B: the rows of all ranks, rank 0 first
    L    = 1/(2B) [ sum_i (logsumexp_j S_ij - t_i) + sum_j (logsumexp_i S_ij - t'_j) ]

where t_i is the target's mean logit, (1 - e) S_ii + (e/B) sum_j S_ij with label smoothing e, and t'_j likewise over
the column. The smoothed terms need no sweep: sum_ij S_ij = scale (sum_i x_i) . (sum_j y_j) + bias B^2.

A bias shifts every logit alike, and softmax does not see it: it leaves L unchanged and its gradient is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._checks import check_alike, check_choice, check_features, check_finite, check_label_smoothing, check_scalar
from .._once import once_differentiable
from .._precision import accumulation_dtype
from ..comm import Communicator, Group, handshake, select_communicator
from ..comm.handshake import GRAD_ENABLED
from ..exchange import GatherExchange
from ..logsumexp import LogSumExp
from ..partition import Partition
from ..sweep import SoftmaxSweep
from ..sync import Sync, check_sync, feature_factor, loss_parameter_gradient
from ._joining import gradient_facts, join


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    group: Group = None,
    sync: Sync = "mean",
    exchange: Literal["auto", "gather"] = "auto",
    memory: Literal["auto", "flat"] = "auto",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Symmetric cross-entropy between the images and texts of all ranks, with its exact gradient.

    S = logit_scale * X Y^T + logit_bias,    L = (CE(S, diagonal) + CE(S^T, diagonal)) / 2,    X, Y: all ranks' rows.

    Args:
        image_features: X_r, (b_r, d), this rank's rows as they are: the caller normalises. b_r may differ between
            ranks and may be 0. float64, float32, bfloat16 or float16 (the last two are widened to float32).
        text_features: Y_r, (b_r, d); row i belongs to row i of X_r.
        logit_scale: multiplies the similarities (1 / temperature, already exponentiated); a number or a tensor of
            shape () or [1], the same on all ranks.
        logit_bias: added to all logits; a number or a tensor of shape () or [1]. Softmax does not see it: it
            receives a gradient of exactly 0, so that engines which look for unused parameters find it used.
        group: ranks that share the batch: a `torch.distributed.ProcessGroup`, a one-dimensional `DeviceMesh`, a
            `wholebatch.comm` communicator, or None for the default group (this process alone if there is none).
        sync: what the engine does with gradients afterwards, see below.
        exchange: how the texts travel: "gather" (memory O(B d)); "auto" chooses.
        memory: "flat": S is computed twice and never stored; "auto" chooses.
        label_smoothing: weight e of the uniform distribution in both targets, 0 <= e <= 1.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.clip_loss` on the concatenated batch.
        Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L. `sync="mean"` (DDP, FSDP, DeepSpeed): after the engine's averaging every
    parameter, encoder's or temperature's, holds dL/d(parameter); features that are leaves hold W * dL/dX_r, scale and
    bias the full gradient on every rank. `sync="sum"` and None: features hold dL/dX_r, and scale this rank's share.

    `backward` is called on every rank, with the same incoming gradient (1, or a loss scaler's factor).

    Work: 4 units of b B d multiply-adds per rank, 1 forward and 3 backward. Memory beyond inputs and gradients: two
    tiles and O(B), and on several ranks O(B d): Y, its gradient, and a buffer of the reduce-scatter.

    Collectives (none on one process): forward 1 handshake of 2 KiB, 1 all-gather of Y (where rows are uneven, a
    broadcast from each rank), 2 all-reduces of B numbers; backward 1 reduce-scatter of dY and, for a learnable scale
    under "mean", 1 all-reduce of a number.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: shapes, dtypes, devices or feature sizes that
            differ, a scale that is no scalar or differs between ranks, NaN or infinite features, an empty global
            batch, an option that does not exist. Also, but on the rank that made the mistake alone because it has
            no way to tell the others: `group` is no group, or one that this rank is not in.
        RuntimeError: if the gradient is differentiated again.

    Source: Radford et al., 2021, arXiv:2103.00020, figure 3.

    >>> import torch, wholebatch as wb
    >>> x, y = torch.eye(3, dtype=torch.float64, requires_grad=True), torch.eye(3, dtype=torch.float64)
    >>> wb.functional.clip_loss(x, y, logit_scale=10.0)
    tensor(9.0796e-05, dtype=torch.float64, grad_fn=<_CLIPBackward>)
    """
    comm = select_communicator(group)
    inputs = (image_features, text_features, logit_scale, logit_bias)

    def state() -> dict[str, Any]:
        _check_options(sync, exchange, memory, label_smoothing)
        check_features("image_features", image_features)
        check_features("text_features", text_features)
        check_alike("image_features", image_features, "text_features", text_features)
        check_finite("image_features", image_features)
        check_finite("text_features", text_features)
        if logit_bias is not None:
            check_scalar("logit_bias", logit_bias)
        return {
            "rows": len(image_features),
            "feature size": image_features.shape[1],
            "dtype": str(image_features.dtype),
            "device type": image_features.device.type,
            "logit_scale": check_scalar("logit_scale", logit_scale),
            "sync": sync,
            "label_smoothing": label_smoothing,
            **gradient_facts(inputs),
        }

    everyone = handshake(
        comm,
        state,
        caller="clip_loss",
        must_match=("feature size", "dtype", "device type", "sync", "label_smoothing", GRAD_ENABLED),
    )
    partition = Partition(tuple(facts["rows"] for facts in everyone))
    if partition.total == 0:
        raise ValueError("clip_loss: the global batch is empty, every rank passed 0 rows")
    scales = [facts["logit_scale"] for facts in everyone]
    if max(scales) - min(scales) > 1e-5 * abs(scales[0]):
        raise ValueError(
            f"clip_loss: logit_scale must be the same on all ranks, got {scales}; give all ranks the same initial "
            "parameters, and let the engine average its gradient like any other's"
        )
    step = _Step(comm, partition, scales[0], float(label_smoothing), sync)
    return _CLIP.apply(*join(inputs, everyone), step)


def _check_options(sync: object, exchange: object, memory: object, label_smoothing: float) -> None:
    check_sync(sync)
    check_choice("exchange", exchange, ("auto", "gather"))
    check_choice("memory", memory, ("auto", "flat"))
    check_label_smoothing(label_smoothing)


@dataclass(frozen=True)
class _Step:
    """What the forward and backward of one call have in common, the same on every rank."""

    comm: Communicator
    partition: Partition
    scale: float
    label_smoothing: float
    sync: Sync

    @property
    def uniform(self) -> float:
        """2 e / B, the smoothed targets' constant in 2B dL/dS."""
        return 2 * self.label_smoothing / self.partition.total

    @property
    def positive(self) -> float:
        """2 (1 - e), the positive pairs' part in 2B dL/dS."""
        return 2 * (1 - self.label_smoothing)

    def sweep(self, x_local: Tensor, y_full: Tensor) -> SoftmaxSweep:
        return SoftmaxSweep(x_local, y_full, self.scale, offset=self.partition.offsets[self.comm.rank])


class _CLIP(torch.autograd.Function):
    """Rows of S are whole on their rank; columns are partial until two all-reduces have merged them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Any, bias: Any, step: _Step) -> Tensor:
        y_full = GatherExchange(step.comm, step.partition).bring(y)
        dtype = accumulation_dtype(x.dtype)
        rows = LogSumExp.empty(len(x), dtype=dtype, device=x.device)
        cols = LogSumExp.empty(len(y_full), dtype=dtype, device=x.device)
        positives = torch.empty_like(rows.shift)
        step.sweep(x, y_full).statistics(rows, cols, positives)

        # The sums over rows and over columns, each less half of the targets. float64: O(b + B) numbers.
        row_terms = rows.value(torch.float64).sum() - step.positive * positives.sum(dtype=torch.float64)
        if step.uniform:
            total_logit = step.scale * torch.dot(_sum_rows(x), _sum_rows(y_full))
            row_terms = row_terms - step.uniform * total_logit
        cols.rescale_(step.comm.all_reduce(cols.shift, "max", check=False))
        merged = step.comm.all_reduce(torch.cat([cols.sum.to(torch.float64), row_terms[None]]), check=False)
        cols.sum, row_terms = merged[:-1].to(dtype), merged[-1]
        loss = (row_terms + cols.value(torch.float64).sum()) / (2 * step.partition.total)

        ctx.step = step
        scale, bias = (value if isinstance(value, Tensor) else None for value in (scale, bias))
        ctx.save_for_backward(x, y, scale, bias, y_full, rows.shift, rows.sum, cols.shift, cols.sum)
        return loss.to(dtype)

    # 2B dL/dS_ij = P_ij + Q_ij - 2 (1 - e) [i = j] - 2 e / B            (see `sweep.softmax`: U = dS Y, V = dS^T X)
    #
    #     dL/dX     = scale / (2B) U
    #     dL/dY     = scale / (2B) V, summed over the ranks, whose rows each see all of Y
    #     dL/dscale = 1 / (2B) sum_ij dS_ij x_i . y_j = 1 / (2B) <X, U> = 1 / (2B) <Y, V>, summed over the ranks
    #     dL/dbias  = 1 / (2B) sum_ij dS_ij = 1 / (2B) [B + B - 2 (1 - e) B - 2 e B] = 0
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:
        step: _Step = ctx.step
        x, y, scale, bias, y_full, *statistics = ctx.saved_tensors
        rows, cols = LogSumExp(*statistics[:2]), LogSumExp(*statistics[2:])
        want_x, want_y, want_scale, want_bias, _ = ctx.needs_input_grad
        dtype = rows.shift.dtype
        half_mean = 1 / (2 * step.partition.total)

        v = torch.zeros_like(y_full, dtype=dtype) if want_y else None
        u = torch.zeros_like(x, dtype=dtype) if want_x or (want_scale and not want_y) else None
        step.sweep(x, y_full).gradients(rows, cols, positive=step.positive, uniform=step.uniform, u=u, v=v)

        grad_scale = None
        if want_scale:
            share = half_mean * (_inner(x, u) if u is not None else _inner(y_full, v))
            grad_scale = grad_loss * loss_parameter_gradient(share, step.comm, step.sync)
            grad_scale = grad_scale.to(scale).view_as(scale)

        factor = grad_loss * (step.scale * half_mean * feature_factor(step.sync, step.comm.size))
        grad_x = u.mul_(factor).to(x.dtype) if u is not None and want_x else None
        grad_y = None
        if v is not None:
            grad_y = GatherExchange(step.comm, step.partition).take_home(v).mul_(factor).to(y.dtype)
        return grad_x, grad_y, grad_scale, torch.zeros_like(bias) if want_bias else None, None


def _sum_rows(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.float64)


def _inner(a: Tensor, b: Tensor | None) -> Tensor:
    """<a, b> in float64, row by row so that no copy in float64 is made."""
    assert b is not None, "a learnable scale always comes with U or V; please report this"
    with torch.autocast(a.device.type, enabled=False):  # the one operation here that autocast would round
        return torch.linalg.vecdot(a.to(b.dtype), b).sum(dtype=torch.float64)


class CLIPLoss(nn.Module):
    """Symmetric cross-entropy over the global batch: the settings of :func:`wholebatch.functional.clip_loss`.

    A module without parameters; `logit_scale` enters `forward`, so that it can stay inside the model that the
    engine wraps.

    Args:
        group, sync, exchange, memory, label_smoothing: as in :func:`wholebatch.functional.clip_loss`.
    """

    def __init__(
        self,
        *,
        group: Group = None,
        sync: Sync = "mean",
        exchange: Literal["auto", "gather"] = "auto",
        memory: Literal["auto", "flat"] = "auto",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        _check_options(sync, exchange, memory, label_smoothing)
        self.group, self.sync, self.exchange, self.memory = group, sync, exchange, memory
        self.label_smoothing = label_smoothing

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        *,
        logit_bias: Tensor | float | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.clip_loss`: (b_r, d), (b_r, d), a scalar -> L, the same on all ranks."""
        return clip_loss(
            image_features,
            text_features,
            logit_scale,
            logit_bias=logit_bias,
            group=self.group,
            sync=self.sync,
            exchange=self.exchange,
            memory=self.memory,
            label_smoothing=self.label_smoothing,
        )

    def extra_repr(self) -> str:
        names = ("sync", "exchange", "memory", "label_smoothing")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
