"""The factor of gradients that makes them exact after the engine's synchronization.

Let L be the loss of the global batch, the same scalar on all W ranks, and theta a parameter that all ranks hold.
Rank r's backward produces its share, the part of dL/dtheta that runs through its local rows; the shares add up:

    dL/dtheta = sum_r share_r,        share_r = (dL/dx_r) (dx_r/dtheta)        x_r: the features of rank r's rows

    sync    the engine then         so features carry       so a scale or bias of the loss carries
    ------  ----------------------  ----------------------  ---------------------------------------
    "mean"  averages over ranks     W * dL/dx_r             dL/dscale, in full, on every rank
    "sum"   adds over ranks         dL/dx_r                 this rank's share of dL/dscale
    None    leaves them alone       dL/dx_r                 this rank's share of dL/dscale

(An average of W equal gradients is that gradient; an average of W * shares is their sum. Multiplying the loss by
W instead, as common recipes do, gets the features right and the temperature wrong by W.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from ._base.autograd import once_differentiable
from ._base.precision import wide_dtype
from ._base.settings import shown
from .comm import Communicator
from .comm.inside import all_reduce

Sync = Literal["mean", "sum"] | None


def check_sync(sync: object) -> None:
    """Raise ValueError unless `sync` is one of "mean", "sum" and None."""
    if sync is not None and (not isinstance(sync, str) or sync not in ("mean", "sum")):
        raise ValueError(
            f"sync must be 'mean' (DDP, FSDP and DeepSpeed average gradients), 'sum' or None; got {shown(sync)}"
        )


def feature_factor(sync: Sync, size: int) -> int:
    """Return the factor of the gradient by a rank's local rows, dL/dx_r."""
    return size if sync == "mean" else 1


def shard_factor(sync: Sync, size: int, *, whole: bool) -> float:
    """Return the gradient factor of a rank-sharded parameter, which the engine does not reduce.

    Args:
        sync: how the engine reduces the gradients of all other parameters.
        size: W.
        whole: whether L is one scalar, the same on all ranks. Else each rank has its own L, and under "mean" the
            engine turns the other gradients into those of the mean over ranks.
    """
    return 1 / size if sync == "mean" and not whole else 1


def replicated_loss_factor(sync: Sync, size: int) -> float:
    """Return the gradient factor of a loss that every rank computes in full.

    Its parameters then carry dL/dtheta on every rank, or under "sum" and None an equal share of it.
    """
    return feature_factor(sync, size) / size


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x, whose gradient is multiplied by a factor."""
    return x if factor == 1 else _ScaleGradient.apply(x, factor)


def loss_parameters(scalars: Sequence[Any], comm: Communicator, sync: Sync) -> list[Any]:
    """Return the parameters of a loss, whose gradient shares the backward pass combines as `sync` requires.

    Collective in backward under "mean": one all-reduce of their numbers.
    """
    learned = [i for i, x in enumerate(scalars) if isinstance(x, Tensor) and x.requires_grad]
    if sync != "mean" or comm.size == 1 or not learned:
        return [*scalars]
    summed = iter(_SumGradients.apply(comm, *(scalars[i] for i in learned)))
    return [next(summed) if i in learned else x for i, x in enumerate(scalars)]


def total(comm: Communicator, share: Tensor) -> Tensor:
    """Return the sum of the ranks' shares of one loss, on every rank. Collective: one all-reduce.

    L = sum_r share_r, so dL/dshare_r = 1. Every rank's backward pass starts from the same L with the same gradient, and
    passes it on to the local share unchanged. An all-reduce there would count L once for each rank.
    """
    return share if comm.size == 1 else _Total.apply(comm, share)


def shared_sum(comm: Communicator, x: Tensor) -> Tensor:
    """Return the sum over ranks, which each rank uses for its own rows, for instance as a mean to subtract.

    Collective: one all-reduce, and one in backward, which adds the gradients of all ranks' uses.
    """
    return x if comm.size == 1 else _SharedSum.apply(comm, x)


class _ScaleGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _SumGradients(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, *scalars: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        ctx.save_for_backward(*scalars)
        return tuple(x.view_as(x) for x in scalars)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *shares: Tensor) -> tuple[Any, ...]:
        device = shares[0].device
        numbers = torch.cat([share.reshape(-1).to(device, wide_dtype(device)) for share in shares])
        totals = all_reduce(ctx.comm, numbers).split([share.numel() for share in shares])
        return None, *(x.to(share).view_as(share) for x, share in zip(totals, shares, strict=True))


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, share: Tensor) -> Tensor:
        return all_reduce(comm, share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class _SharedSum(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, x: Tensor) -> Tensor:
        ctx.comm = comm
        ctx.save_for_backward(x)
        return all_reduce(comm, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, all_reduce(ctx.comm, grad)
