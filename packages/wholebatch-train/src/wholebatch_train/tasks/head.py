"""The classifier of `--task identify`, and its margin, from the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import wholebatch as wb

from ..config import HeadConfig, TrainConfig

_COSFACE_M = 0.1  # there are few images of each class, and many classes look alike


def make_head(config: TrainConfig, width: int, classes: int, device: torch.device, group: Any = None) -> wb.PartialFC:
    """Make this rank's shard of the classifier of embeddings of this width."""
    head = config.head
    return wb.PartialFC(
        width,
        classes,
        margin=make_margin(head),
        sub_centers=head.sub_centers,
        sample_rate=head.sample_rate,
        label_smoothing=config.label_smoothing,
        seed=config.seed,
        group=group,
        device=device,
    )


def has_reference(head: HeadConfig) -> bool:
    """Return whether the reference implementation has the head's loss: one batch, all centers, a stateless margin."""
    return head.sample_rate == 1.0 and head.margin in ("arcface", "cosface", "sphereface", "normface")


def make_margin(head: HeadConfig) -> Any:
    """Make the margin with its scale, and with its size if one is configured."""
    margins: dict[str, Callable[..., Any]] = {
        "arcface": wb.ArcFace,
        "cosface": wb.CosFace,
        "sphereface": wb.SphereFace,
        "normface": wb.NormFace,
        "adaface": wb.AdaFace,
        "magface": wb.MagFace,
        "curricularface": wb.CurricularFace,
    }
    m = _COSFACE_M if head.m is None and head.margin == "cosface" else head.m
    return margins[head.margin](s=head.scale, **({} if m is None else {"m": m}))
