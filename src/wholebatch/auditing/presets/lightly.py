"""lightly: losses of two views and of batch statistics, and those of this library in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

from ..._base.third_party import declare_torchvision_operators
from ...integrations import lightly as ours
from ..problem import Problem
from .encoders import two_views

declare_torchvision_operators()
import lightly.loss  # noqa: E402


def _views(loss: str, module: ModuleType = lightly.loss, **options: Any) -> Problem:
    loss_fn: Callable[..., Tensor] = getattr(module, loss)(**options)
    return two_views(loss_fn, uneven=module is ours, empty=module is ours)


_LOSSES = ("NTXentLoss", "DCLLoss", "DCLWLoss", "BarlowTwinsLoss", "VICRegLoss")
_GATHERED = (*_LOSSES, "TiCoLoss")
SETTINGS: dict[str, Callable[[], Problem]] = {
    **{f"{loss}, default": partial(_views, loss) for loss in _LOSSES},
    **{f"{loss}, gather_distributed=True": partial(_views, loss, gather_distributed=True) for loss in _GATHERED},
    **{f"{loss} of wholebatch.integrations": partial(_views, loss, ours) for loss in _LOSSES},
}
