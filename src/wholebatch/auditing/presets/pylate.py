"""PyLate: its losses of late interaction, and those of this library, against one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb

from ..._base.third_party import declare_torchvision_operators
from ...integrations import pylate as ours
from ..problem import Problem
from .encoders import ROWS, Encoder, tokens

declare_torchvision_operators()
from pylate import losses  # noqa: E402

_NAMES = ("query", "positive", "negative")


class _Encoder(Encoder):
    """An encoder in the form that these losses call, with an embedding of each token."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = False  # so masks of queries count

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Encode {"embeddings": (b, tokens, IN)} -> {"token_embeddings": (b, tokens, OUT)}, not normalized."""
        return {"token_embeddings": self.encoder(features["embeddings"])}


def _features(batch: Mapping[str, Tensor], names: tuple[str, ...]) -> list[dict[str, Tensor]]:
    return [
        {
            "embeddings": batch[name],
            "attention_mask": batch[f"{name}_mask"],
            "input_ids": torch.ones_like(batch[f"{name}_mask"], dtype=torch.int64),
        }
        for name in names
    ]


def _encode(model: nn.Module, batch: Mapping[str, Tensor], name: str) -> Tensor:
    """Return embeddings of norm 1, and zeros in the padding, which PyLate gives the score 0."""
    (features,) = _features(batch, (name,))
    return normalize(model(features)["token_embeddings"], dim=-1) * batch[f"{name}_mask"][..., None]


def _contrastive(loss: str, module: ModuleType = losses, **options: Any) -> Problem:
    def rank_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        return getattr(module, loss)(model, **options)(_features(batch, _NAMES))

    def reference_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        queries, *documents = [_encode(model, batch, name) for name in _NAMES]
        return wb.reference.max_sim_loss(
            queries,
            torch.stack(documents, 1).flatten(0, 1),
            logit_scale=1 / options.get("temperature", 1.0),
            query_mask=batch["query_mask"],
            documents_per_query=2,
            reduction="mean" if options.get("size_average", True) else "sum",
        )

    batch, own = tokens(query=4, positive=6, negative=6), module is ours
    return Problem(_Encoder(), batch, rank_loss, reference=reference_loss, engine="ddp", uneven=own, empty=own)


def _distillation() -> Problem:
    batch = tokens(query=4, document_0=6, document_1=6, document_2=6)
    batch["teacher"] = torch.randn(ROWS, 3)
    names = ("document_0", "document_1", "document_2")

    def rank_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        (queries,) = _features(batch, ("query",))
        columns = _features(batch, names)
        documents = {name: torch.stack([x[name] for x in columns], 1).flatten(0, 1) for name in columns[0]}
        return losses.Distillation(model)([queries, documents], batch["teacher"])

    return Problem(_Encoder(), batch, rank_loss, engine="ddp")


_PLAIN, _CACHED = "Contrastive", "CachedContrastive"
SETTINGS: dict[str, Callable[[], Problem]] = {
    f"{_PLAIN}, default": partial(_contrastive, _PLAIN),
    f"{_PLAIN}, gather_across_devices=True": partial(_contrastive, _PLAIN, gather_across_devices=True),
    f"{_CACHED}, default": partial(_contrastive, _CACHED, mini_batch_size=2),
    f"{_CACHED}, gather_across_devices=True": partial(
        _contrastive, _CACHED, mini_batch_size=2, gather_across_devices=True
    ),
    f"{_CACHED}, size_average=False": partial(_contrastive, _CACHED, mini_batch_size=2, size_average=False),
    "Distillation": _distillation,
    f"{_PLAIN} of wholebatch.integrations": partial(_contrastive, _PLAIN, ours),
    f"{_CACHED} of wholebatch.integrations": partial(_contrastive, _CACHED, ours, mini_batch_size=2),
}
