"""The task of a run's data."""

from __future__ import annotations

import torch

from .config import TrainConfig
from .data.labeled import LabeledImages
from .data.load import Data
from .identify import Identify
from .retrieve import Retrieve
from .task import Task


def make_task(
    config: TrainConfig, data: Data, device: torch.device, *, rank: int, size: int, dense: bool = False
) -> Task:
    """Make this rank's part of the task; if `dense`, with a loss that this process computes alone."""
    if isinstance(data, LabeledImages):
        return Identify(config, data, device, rank=rank, size=size, dense=dense)
    return Retrieve(config, *data, device, rank=rank, size=size, dense=dense)
