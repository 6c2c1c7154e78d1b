"""pytorch-metric-learning: some of its losses, alone and in its wrapper for several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

from ..problem import Problem
from .encoders import labeled


def _wrapped(loss: str, *, efficient: bool | None) -> Problem:
    made = getattr(losses, loss)()
    return labeled(made if efficient is None else DistributedLossWrapper(made, efficient=efficient))


SETTINGS: dict[str, Callable[[], Problem]] = {
    "NTXentLoss alone": partial(_wrapped, "NTXentLoss", efficient=None),
    **{
        f"DistributedLossWrapper({loss}, efficient={efficient})": partial(_wrapped, loss, efficient=efficient)
        for loss in ("NTXentLoss", "SupConLoss", "MultiSimilarityLoss")
        for efficient in (False, True)
    },
}
