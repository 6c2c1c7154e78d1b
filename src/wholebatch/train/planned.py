"""The plan at the start of a run: how the loss is going to be computed, and what it takes, before it has run."""

from __future__ import annotations

import torch

import wholebatch as wb
from wholebatch.planning.units import amount

from .config import TrainConfig
from .data import Data

_ANY_CARD = "a100"  # bytes are the same on all
_ENOUGH = 2**50


def plan_start(config: TrainConfig, data: Data, device: torch.device, *, size: int) -> str:
    """What the library takes by itself for this run, in a line.

    Args:
        config: of the run.
        data: of the run, whose texts are the classes to identify.
        device: of the run.
        size: W.
    """
    classes = None if isinstance(data, tuple) else len(data)
    if classes is None and config.loss not in ("clip", "siglip", "nt_xent", "sup_con"):
        return f"plan: none, the planner does not know what --loss {config.loss} is here"
    if classes is not None and config.head.margin == "curricularface":
        return "plan: none, the planner does not know --head.margin curricularface"
    found = wb.plan(
        # of sup_con both towers' features are examples
        batch_size=config.batch_size * (2 if config.loss == "sup_con" else 1),
        embedding_size=config.model.feature_size,
        ranks=size,
        loss=config.loss if classes is None else None,
        memory_limit=_ENOUGH,  # whether it fits is seen when it runs
        device="cpu" if device.type == "cpu" else _ANY_CARD,
        classes=None if classes is None else classes * config.head.sub_centers,
        sample_rate=None if classes is None else config.head.sample_rate,
    )
    option = next(option for option in found.options if option.auto)
    if config.label_smoothing:  # then nothing is kept
        option = next(o for o in found.options if o.exchange == option.exchange and o.memory == "flat")
    what = config.loss if classes is None else f"{classes} classes"
    on = f"on {size} process{'es' if size > 1 else ''}"
    sent = f", exchange {option.exchange}, {amount(option.wire)} sent by each" if option.exchange else ""
    chunks = f", {config.chunk_size} pairs encoded at a time" if config.chunk_size else ""
    loss = f"{amount(option.of_loss)} and {option.flops / 1e9:.3g} GFLOP for the loss"
    return f"plan: {what} {on}, similarities {option.similarities}: {loss}{sent}{chunks}"
