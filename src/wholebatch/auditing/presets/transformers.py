"""transformers: a training step by its Trainer, with a plain loss function, and with the adapters of this library."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb

from ..._base.third_party import declare_torchvision_operators
from ...integrations.transformers import ComputeLoss, WholeBatchTrainerMixin
from ..problem import Problem
from .encoders import IN, ROWS, TwoTowers

declare_torchvision_operators()
from transformers import Trainer, TrainingArguments  # noqa: E402


class _Model(TwoTowers):
    """Two encoders whose forward takes any keyword, as CLIPModel's does."""

    def forward(self, images: Tensor, texts: Tensor, **_: Any) -> tuple[Tensor, ...]:
        """Encode (b, IN), (b, IN) -> (b, OUT), (b, OUT), scale."""
        return super().forward(images, texts)


class _WithMixin(WholeBatchTrainerMixin, Trainer):
    """A Trainer for the whole batch."""


def _mean(outputs: tuple[Tensor, ...], _labels: Tensor | None, num_items_in_batch: Tensor | None = None) -> Tensor:
    return wb.functional.clip_loss(*outputs)


def _function(model: nn.Module, args: TrainingArguments) -> Any:
    return Trainer(model, args, compute_loss_func=ComputeLoss(wb.CLIPLoss(), args, model))


def _problem(make: Callable[..., Any], **settings: Any) -> Problem:
    model = _Model()
    args = TrainingArguments(tempfile.gettempdir(), use_cpu=True, report_to=[], remove_unused_columns=False)
    trainer = make(model, args, **settings)  # here, and not in the step, since a Trainer sets the seed
    trainer.current_gradient_accumulation_steps = 1

    def step(model: nn.Module, batch: Mapping[str, Tensor]) -> float:
        parts, items = trainer.get_batch_samples(iter([dict(batch)]), 1, torch.device("cpu"))
        return float(trainer.training_step(model, parts[0], items))

    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN), "labels": torch.arange(ROWS)}

    def reference_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return wb.reference.clip_loss(*model(batch["images"], batch["texts"]))

    return Problem(model, batch, step=step, reference=reference_loss, engine="ddp")


SETTINGS: dict[str, Callable[[], Problem]] = {
    "compute_loss_func=, a mean over the batch, and a batch with labels": partial(
        _problem, partial(Trainer, compute_loss_func=_mean)
    ),
    "WholeBatchTrainerMixin of wholebatch.integrations": partial(_problem, _WithMixin),
    "the same, chunk_size=2": partial(_problem, _WithMixin, chunk_size=2),
    "ComputeLoss of wholebatch.integrations": partial(_problem, _function),
}
