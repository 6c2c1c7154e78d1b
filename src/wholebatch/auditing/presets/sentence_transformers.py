"""sentence-transformers: its in-batch losses, plain and cached, and those of this library in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..._third_party import declare_torchvision_operators
from ...integrations import sentence_transformers as ours
from ..problem import Problem
from .encoders import IN, ROWS, mlp

declare_torchvision_operators()
from sentence_transformers import losses  # noqa: E402


class _Encoder(nn.Module):
    """An encoder in the form that these losses call: a dict of features in, the same with an embedding out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()

    def __getitem__(self, at: int) -> nn.Module:
        return self.encoder[at]  # a loss checks whether the first module takes parts of a batch

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encode {"input_ids": (b, IN)} -> {"sentence_embedding": (b, OUT), ...}."""
        return {**features, "sentence_embedding": self.encoder(features["input_ids"])}


def _ranking(loss: str, module: ModuleType = losses, **options: Any) -> Problem:
    def of_rank(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        columns = [{"input_ids": batch[name]} for name in ("anchor", "positive", "negative")]
        made = getattr(module, loss)(getattr(model, "module", model), **options)
        made.model = model  # the trainer sets the wrapped model in the same way
        found: Tensor = made(columns, None)
        return found

    batch = {name: torch.randn(ROWS, IN) for name in ("anchor", "positive", "negative")}
    return Problem(_Encoder(), batch, of_rank, engine="ddp")


_PLAIN, _CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
_BOTH = ("query_to_doc", "doc_to_query")
SETTINGS: dict[str, Callable[[], Problem]] = {
    f"{_PLAIN}, default": partial(_ranking, _PLAIN),
    f"{_PLAIN}, gather_across_devices=True": partial(_ranking, _PLAIN, gather_across_devices=True),
    "the same, both directions": partial(_ranking, _PLAIN, gather_across_devices=True, directions=_BOTH),
    f"{_CACHED}, default": partial(_ranking, _CACHED, mini_batch_size=2),
    f"{_CACHED}, gather_across_devices=True": partial(_ranking, _CACHED, mini_batch_size=2, gather_across_devices=True),
    f"{_PLAIN} of wholebatch.integrations": partial(_ranking, _PLAIN, ours),
    f"{_CACHED} of wholebatch.integrations": partial(_ranking, _CACHED, ours, mini_batch_size=2),
}
