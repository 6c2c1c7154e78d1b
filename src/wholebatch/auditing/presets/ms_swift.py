"""ms-swift: its loss `infonce` of embedding models, alone and with the adapter of this library."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from swift.loss.embedding import InfonceLoss
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb

from ...integrations import ms_swift as ours
from ..problem import Problem
from .encoders import IN, OUT, ROWS

_GROUP = 4  # a query, its positive and two negatives
_TEMPERATURE = 0.1
_QWEN3 = dict.fromkeys(("INFONCE_MASK_FAKE_NEGATIVE", "INFONCE_INCLUDE_QQ", "INFONCE_INCLUDE_DD"), "True")


def _problem(loss: Callable[[Any, Any], Any], **variables: str) -> Problem:
    """Return the problem of a model under DDP with queries, positives and two negatives each."""
    PartialState(cpu=True)  # by which ms-swift gathers
    loss_fn = loss(None, None)

    def rank_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        os.environ |= variables
        try:
            sentences = normalize(model(batch["groups"]), dim=-1).flatten(0, 1)
            labels = torch.tensor([1.0, 0.0, 0.0]).repeat(len(batch["groups"]))
            return loss_fn({"last_hidden_state": sentences}, labels)
        finally:
            for name in variables:
                del os.environ[name]

    def reference_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        rows = normalize(model(batch["groups"]), dim=-1)
        several = "INFONCE_INCLUDE_QQ" in variables
        return wb.reference.info_nce_loss(
            rows[:, 0],
            rows[:, 1],
            negatives=rows[:, 2:].flatten(0, 1),
            logit_scale=1 / _TEMPERATURE,
            directions=("query_to_key", "query_to_query", "key_to_key") if several else ("query_to_key",),
            exclude_above=0.1 if several else None,
            exclude_directions=("query_to_key", "query_to_query") if several else None,
        )

    model = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, OUT))
    return Problem(model, {"groups": torch.randn(ROWS, _GROUP, IN)}, rank_loss, reference=reference_loss, engine="ddp")


SETTINGS: dict[str, Callable[[], Problem]] = {
    "infonce": partial(_problem, InfonceLoss),
    "infonce as for Qwen3-Embedding": partial(_problem, InfonceLoss, **_QWEN3),
    "infonce, INFONCE_USE_BATCH=False, against the whole batch": partial(
        _problem, InfonceLoss, INFONCE_USE_BATCH="False"
    ),
    "infonce of wholebatch.integrations": partial(_problem, ours.InfonceLoss),
    "infonce of wholebatch.integrations as for Qwen3-Embedding": partial(_problem, ours.InfonceLoss, **_QWEN3),
}
