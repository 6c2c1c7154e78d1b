"""lightly: losses of two views and of batch statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..._third_party import declare_torchvision_operators
from ..problem import Problem
from .encoders import two_views

declare_torchvision_operators()
import lightly.loss  # noqa: E402


def _views(loss: str, **options: Any) -> Problem:
    made: Callable[..., Tensor] = getattr(lightly.loss, loss)(**options)
    return two_views(made)


_GATHERED = ("NTXentLoss", "DCLLoss", "DCLWLoss", "BarlowTwinsLoss", "VICRegLoss", "TiCoLoss")
SETTINGS: dict[str, Callable[[], Problem]] = {
    "NTXentLoss, default": partial(_views, "NTXentLoss"),
    **{f"{loss}, gather_distributed=True": partial(_views, loss, gather_distributed=True) for loss in _GATHERED},
}
