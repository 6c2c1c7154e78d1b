"""The plan of a run: how its loss will be computed, and its memory, work and bytes sent."""

from __future__ import annotations

import torch

import wholebatch as wb
from wholebatch.app import amount
from wholebatch.app.tensors import CATALOG, LOSSES

from .config import TrainConfig
from .data.load import Data
from .tasks.objectives import SETTINGS

_ANY_CARD = "a100"  # bytes are the same on all cards
_ENOUGH = 2**50


def plan_start(config: TrainConfig, data: Data, device: torch.device, *, size: int) -> str:
    """Return a line about the method that the library chooses for this run."""
    classes = None if isinstance(data, tuple) else len(data)
    if classes is None and (config.loss not in LOSSES or config.loss in SETTINGS):
        return f"plan: none, because the planner does not know --loss {config.loss} of this application"
    if classes is not None and config.head.margin == "curricularface":
        return "plan: none, because the planner does not know --head.margin curricularface"
    if classes is not None and config.image_encoder != "small":
        return "plan: none, because the width of an encoder of a library is known once it is made"
    labeled = classes is None and CATALOG[config.loss].kind == "labeled"
    plan = wb.plan(
        # the examples of a loss with labels are the features of both towers
        batch_size=config.batch_size * (2 if labeled else 1),
        embedding_size=config.model.embedding_size,
        ranks=size,
        loss=config.loss if classes is None else None,
        memory_limit=_ENOUGH,  # the run itself shows whether it fits
        device="cpu" if device.type == "cpu" else _ANY_CARD,
        classes=None if classes is None else classes * config.head.sub_centers,
        sample_rate=None if classes is None else config.head.sample_rate,
    )
    option = next(option for option in plan.options if option.auto)
    if config.label_smoothing:  # with which nothing is kept
        option = next(o for o in plan.options if o.exchange == option.exchange and o.memory == "flat")
    name = config.loss if classes is None else f"{classes} classes"
    on = f"on {size} process{'es' if size > 1 else ''}"
    sent = f", exchange {option.exchange}, {amount(option.wire)} sent by each" if option.exchange else ""
    chunks = f", {config.chunk_size} rows encoded at a time" if config.chunk_size else ""
    loss = f"{amount(option.of_loss)} and {option.flops / 1e9:.3g} GFLOP for the loss"
    return f"plan: {name} {on}, similarities {option.similarities}: {loss}{sent}{chunks}"
