"""The task of a run's data."""

from __future__ import annotations

import torch

from wholebatch.app import UserError

from ..config import Kind, TrainConfig
from ..data.classes import LabeledImages
from ..data.load import Data
from ..encoders.make import make_encoder
from .identify import Identify
from .retrieve import Retrieve
from .task import Task


def check_encoders(config: TrainConfig, data: Data) -> None:
    """Refuse encoders that cannot be made, before anything is written."""
    sides = ["image"] if isinstance(data, LabeledImages) else [side.kind for side in data[0].sides.values()]
    kinds: tuple[tuple[Kind, str], ...] = (("image", config.image_encoder), ("text", config.text_encoder))
    for kind, text in kinds:
        if text == "small":
            continue
        if kind not in sides:
            raise UserError(f"--{kind}-encoder must be left out, because the run encodes no {kind}s, got {text!r}")
        make_encoder(config, kind)


def make_task(
    config: TrainConfig, data: Data, device: torch.device, *, rank: int, size: int, dense: bool = False
) -> Task:
    """Make this rank's part of the task; if `dense`, with a loss that this process computes alone."""
    if isinstance(data, LabeledImages):
        return Identify(config, data, device, rank=rank, size=size, dense=dense)
    return Retrieve(config, *data, device, rank=rank, size=size, dense=dense)
