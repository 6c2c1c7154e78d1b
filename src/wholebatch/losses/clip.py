"""CLIP: symmetric softmax cross-entropy over the global batch, exact on any number of ranks, flat in memory.

    S_ij = scale x_i . y_j + bias          i, j = 1 ... B: the rows of all ranks, rank 0 first
    L    = 1/(2B) [ sum_i (logsumexp_j S_ij - t_i) + sum_j (logsumexp_i S_ij - t'_j) ]

where t_i is the target's mean logit, (1 - e) S_ii + (e/B) sum_j S_ij with label smoothing e, and t'_j likewise over
the column. The smoothed terms need no sweep: sum_ij S_ij = scale (sum_i x_i) . (sum_j y_j) + bias B^2.

A bias shifts every logit alike, and softmax does not see it: it leaves L unchanged and its gradient is exactly 0.
"""

from __future__ import annotations

from torch import Tensor

from .._checks import check_label_smoothing
from ..comm import Group
from ..exchange import ExchangeName
from ..partition import Diagonal
from ..sweep import Memory, Pairs
from ..sync import Sync
from ._door import LossModule, Options, agree, eager
from ._softmax import SoftmaxPlan, softmax_loss
from ._towers import Towers


@eager
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
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
        exchange: how the texts travel: "gather" (all of Y on every rank, memory O(B d)), "ring" (from rank to rank,
            memory O(b d); on gloo and MPI), or "auto": "gather" while it takes at most 1 GiB, and always on NCCL.
        memory: of the tiles of S. "flat": S is computed twice and never stored; an int: so many bytes per rank, which
            hold exp(S), or part of it, between forward and backward, so that it is computed once; "auto": "flat" but
            for small batches. What is kept in half precision, and what that costs: `wholebatch.sweep.memory`.
        label_smoothing: weight e of the uniform distribution in both targets, 0 <= e <= 1.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.clip_loss` on the concatenated batch.
        Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L. `sync="mean"` (DDP, FSDP, DeepSpeed): after the engine's averaging every
    parameter, encoder's or temperature's, holds dL/d(parameter); features that are leaves hold W * dL/dX_r, scale and
    bias the full gradient on every rank. `sync="sum"` and None: features hold dL/dX_r, and scale this rank's share.

    `backward` is called on every rank, with the same incoming gradient (1, or a loss scaler's factor).

    Work: 4 units of b B d multiply-adds per rank, 1 forward and 3 backward; 3 for the part of exp(S) that is kept.
    Memory beyond inputs and gradients: two tiles and O(B), and on several ranks Y, its gradient, and a buffer of the
    reduce-scatter ("gather", 3 B d), or five blocks of Y ("ring", 5 b d).

    Collectives (none on one process): forward 1 handshake of 2 KiB, then "gather": 1 all-gather of Y and 1 all-reduce
    of B + 2 numbers; "ring": W - 1 messages of a block, W of its b numbers, and 1 all-reduce of 2 numbers. Backward
    1 reduce-scatter of dY, or the ring's messages once more with as many of gradients; and for a learnable scale
    under "mean" 1 all-reduce of a number. Where one shift does not do (see `wholebatch.logsumexp`), forward
    passes over S three times, each with its messages or, but for the ring's maxima, its all-reduce.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: shapes, dtypes, devices or feature sizes that
            differ, a scale that is no scalar or differs between ranks, NaN or infinite features, an empty global
            batch, an option that does not exist, a `memory` that is too small for any tile. Also, but on the rank
            that made the mistake alone because it has no way to tell the others: `group` is no group, or one that
            this rank is not in.
        RuntimeError: if the gradient is differentiated again.

    Source: Radford et al., 2021, arXiv:2103.00020, figure 3.

    >>> import torch, wholebatch as wb
    >>> x, y = torch.eye(3, dtype=torch.float64, requires_grad=True), torch.eye(3, dtype=torch.float64)
    >>> wb.functional.clip_loss(x, y, logit_scale=10.0)
    tensor(9.0796e-05, dtype=torch.float64, grad_fn=<_SoftmaxBackward>)
    """

    def check() -> dict[str, float]:
        check_label_smoothing(label_smoothing)
        return {"label_smoothing": float(label_smoothing)}

    agreed = agree(
        "clip_loss",
        Options(group, sync, exchange, memory),
        scalars={"logit_scale": logit_scale, "logit_bias": logit_bias},
        features={"image_features": image_features, "text_features": text_features},
        paired=("image_features", "text_features"),
        optional=("logit_bias",),
        check=check,
        must_match=("label_smoothing",),
    )
    rows, norms, scale = agreed.rows["image_features"], agreed.norms, agreed.scalars["logit_scale"]
    how, budget = agreed.exchange(rows, rows)
    plan = SoftmaxPlan(
        agreed.comm,
        how,
        Towers(stays=(0,), travels=(1,)),
        Pairs(positive=(Diagonal(0, rows.offsets[agreed.rank], rows.counts[agreed.rank]),)),
        scale,
        bound=abs(scale) * norms["image_features"] * norms["text_features"],
        softmaxes=2 * rows.total,
        longest=rows.total,
        rows=True,
        cols=True,
        budget=budget,
        sync=sync,
        differentiable=agreed.differentiable,
        label_smoothing=float(label_smoothing),
    )
    given_scale, bias, *features = agreed.inputs
    return softmax_loss(plan, given_scale, bias, features)


class CLIPLoss(LossModule):
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
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(group, sync, exchange, memory)
        check_label_smoothing(label_smoothing)
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
        return f"{super().extra_repr()}, label_smoothing={self.label_smoothing!r}"
