"""What the engine does with gradients afterwards, and the one factor that makes the result exact.

Let L be the loss of the global batch, the same scalar on all W ranks, and theta a parameter that all ranks hold.
Rank r's backward produces its share, the part of dL/dtheta that runs through its own rows; the shares add up:

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

from typing import Literal

from torch import Tensor

from .comm import Communicator

Sync = Literal["mean", "sum"] | None


def check_sync(sync: object) -> None:
    """Raise ValueError unless `sync` is one of "mean", "sum" and None."""
    if sync not in ("mean", "sum", None):
        raise ValueError(
            f"sync must be 'mean' (DDP, FSDP and DeepSpeed average gradients), 'sum' or None; got {sync!r}"
        )


def feature_factor(sync: Sync, size: int) -> int:
    """What a rank's own dL/dx_r is multiplied by."""
    return size if sync == "mean" else 1


def replicated_loss_factor(sync: Sync, size: int) -> float:
    """What the gradient of a loss is multiplied by that every rank computes in full.

    Its parameters then carry dL/dtheta on every rank, or under "sum" and None an equal share of it.
    """
    return feature_factor(sync, size) / size


def loss_parameter_gradient(share: Tensor, comm: Communicator, sync: Sync) -> Tensor:
    """The gradient that a replicated parameter of the loss (scale, bias) carries, from this rank's share.

    Collective under "mean": one all-reduce of the share.
    """
    return comm.all_reduce(share, check=False) if sync == "mean" else share


def total_or_share(total: Tensor, share: Tensor, sync: Sync) -> Tensor:
    """The same, where the sum of the shares is known already."""
    return total if sync == "mean" else share
