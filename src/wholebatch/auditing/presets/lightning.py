"""Lightning: a step of its Trainer with a head, by its strategy "ddp" and by that of this library."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import wholebatch as wb

from ...integrations.lightning import ddp_strategy
from ..problem import Problem
from .encoders import IN, OUT, ROWS, mlp

_CLASSES = 10


class _Classifier(lightning.LightningModule):
    """A backbone and a head; its optimizer leaves the parameters alone."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = mlp(), head
        self.values: list[float] = []

    def training_step(self, batch: Mapping[str, Tensor], _index: int) -> Tensor:
        """Return the loss of this rank's rows."""
        features = self.backbone(batch["images"])
        if isinstance(self.head, wb.PartialFC):
            loss: Tensor = self.head(features, batch["labels"])
        else:
            loss = cross_entropy(self.head(features), batch["labels"])
        self.values.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _problem(head: Callable[[], nn.Module], strategy: Callable[[], Any], *, uneven: bool = False) -> Problem:
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}  # as launched, beside what the audit sets
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def step(model: _Classifier, batch: Mapping[str, Tensor]) -> float:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy(),
            max_steps=1,
            barebones=True,
            use_distributed_sampler=False,
        )
        data: Any = [dict(batch)]
        own = torch.Generator()  # a loader draws a number, and the default generator would count as the problem's
        trainer.fit(model, DataLoader(data, batch_size=None, generator=own))
        return model.values[-1]

    batch = {"images": torch.randn(ROWS, IN), "labels": torch.arange(ROWS) % _CLASSES}
    return Problem(_Classifier(head()), batch, step=step, engine="none", uneven=uneven)


def _ddp() -> str:
    return "ddp" if dist.get_world_size() > 1 else "auto"


_replicated = partial(nn.Linear, OUT, _CLASSES)
_sharded = partial(wb.PartialFC, OUT, _CLASSES, margin=wb.ArcFace(8.0, 0.3), seed=1)
SETTINGS: dict[str, Callable[[], Problem]] = {
    'Trainer(strategy="ddp"), a replicated head': partial(_problem, _replicated, _ddp),
    'Trainer(strategy="ddp"), wholebatch.PartialFC': partial(_problem, _sharded, _ddp),
    "ddp_strategy of wholebatch.integrations, wholebatch.PartialFC": partial(
        _problem, _sharded, ddp_strategy, uneven=True
    ),
}
