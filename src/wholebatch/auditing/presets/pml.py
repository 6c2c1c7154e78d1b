"""pytorch-metric-learning: its losses, alone and in its wrapper for several ranks, and those of this library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn

from ...integrations import pytorch_metric_learning as ours
from ..problem import Problem
from .encoders import labeled, two_views


def _labeled(make: Callable[[], nn.Module], **options: Any) -> Problem:
    return labeled(make(), **options)


def _wrapped(loss: str, *, efficient: bool) -> nn.Module:
    return DistributedLossWrapper(getattr(losses, loss)(), efficient=efficient)


_LOSSES = ("NTXentLoss", "SupConLoss", "MultiSimilarityLoss")
_ANY: dict[str, Any] = {"uneven": True, "empty": True}
SETTINGS: dict[str, Callable[[], Problem]] = {
    **{f"{loss} alone": partial(_labeled, getattr(losses, loss)) for loss in _LOSSES},
    **{
        f"DistributedLossWrapper({loss}, efficient={efficient})": partial(
            _labeled, partial(_wrapped, loss, efficient=efficient)
        )
        for loss in (*_LOSSES, "TripletMarginLoss")
        for efficient in (False, True)
    },
    **{
        f"{loss} of wholebatch.integrations": partial(_labeled, getattr(ours, loss), **_ANY)
        for loss in (*_LOSSES, "CircleLoss")
    },
    "DistributedLossWrapper(TripletMarginLoss) of wholebatch.integrations": partial(
        _labeled, lambda: ours.DistributedLossWrapper(losses.TripletMarginLoss()), **_ANY
    ),
    "SelfSupervisedLoss(NTXentLoss) of wholebatch.integrations": lambda: two_views(
        ours.SelfSupervisedLoss(ours.NTXentLoss()), **_ANY
    ),
}
