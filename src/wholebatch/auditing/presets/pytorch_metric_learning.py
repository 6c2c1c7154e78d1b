"""pytorch-metric-learning: its losses, alone and in its wrapper for several ranks, and those of this library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

from ...integrations import pytorch_metric_learning as ours
from ..problem import Problem
from .encoders import labeled, two_views


def _alone(loss: str) -> Problem:
    return labeled(getattr(losses, loss)())


def _wrap(loss: str, *, efficient: bool) -> Problem:
    return labeled(DistributedLossWrapper(getattr(losses, loss)(), efficient=efficient))


def _ours(loss: str) -> Problem:
    return labeled(getattr(ours, loss)(), uneven=True, empty=True)


def _our_wrapper() -> Problem:
    return labeled(ours.DistributedLossWrapper(losses.TripletMarginLoss()), uneven=True, empty=True)


def _our_views() -> Problem:
    return two_views(ours.SelfSupervisedLoss(ours.NTXentLoss()), uneven=True, empty=True)


_LOSSES = ("NTXentLoss", "SupConLoss", "MultiSimilarityLoss")
SETTINGS: dict[str, Callable[[], Problem]] = {
    **{f"{loss} alone": partial(_alone, loss) for loss in _LOSSES},
    **{
        f"DistributedLossWrapper({loss}, efficient={efficient})": partial(_wrap, loss, efficient=efficient)
        for loss in (*_LOSSES, "TripletMarginLoss")
        for efficient in (False, True)
    },
    **{f"{loss} of wholebatch.integrations": partial(_ours, loss) for loss in (*_LOSSES, "CircleLoss")},
    "DistributedLossWrapper(TripletMarginLoss) of wholebatch.integrations": _our_wrapper,
    "SelfSupervisedLoss(NTXentLoss) of wholebatch.integrations": _our_views,
}
