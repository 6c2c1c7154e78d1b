"""sentence-transformers: its in-batch losses, plain and cached, of one or many vectors, and those of this library."""

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
from ...integrations import sentence_transformers as ours
from ..problem import Problem
from .encoders import IN, ROWS, Encoder, tokens

declare_torchvision_operators()
from sentence_transformers import losses  # noqa: E402
from sentence_transformers.multi_vector_encoder import losses as losses_of_tokens  # noqa: E402

_COLUMNS = ("anchor", "positive", "negative")


class _Encoder(Encoder):
    """An encoder in the form that these losses call: a dict of features in, the same with an embedding out."""

    def __getitem__(self, index: int) -> nn.Module:
        return self.encoder[index]  # a loss checks whether the first module takes parts of a batch

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encode {"input_ids": (b, IN)} -> {"sentence_embedding": (b, OUT), ...}."""
        return {**features, "sentence_embedding": self.encoder(features["input_ids"])}


class _TokenEncoder(_Encoder):
    """The same with an embedding of each token, as multi-vector models have it."""

    def forward(self, features: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        """Encode {"input_ids": (b, tokens, IN)} -> {"token_embeddings": (b, tokens, OUT), ...}."""
        return {**features, "token_embeddings": normalize(self.encoder(features["input_ids"]), dim=-1)}


def _scores(queries: Tensor, documents: Tensor, queries_mask: Tensor, documents_mask: Tensor) -> Tensor:
    """Return what their `colbert_scores` returns, which rounds to float32: no finite difference is seen in that."""
    columns = zip(documents.unbind(1), documents_mask.unbind(1), strict=True)
    scores = [wb.reference.max_sim(queries, x, query_mask=queries_mask, document_mask=mask) for x, mask in columns]
    return torch.stack(scores, 2).flatten(1)


def _features(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    names = {"input_ids": "", "attention_mask": "_mask"}
    return [{key: batch[column + end] for key, end in names.items() if column + end in batch} for column in _COLUMNS]


def _loss(
    name: str, module: ModuleType, options: Mapping[str, Any], model: nn.Module, batch: Mapping[str, Tensor]
) -> Any:
    loss_fn = getattr(module, name)(getattr(model, "module", model), **options)
    if module is losses_of_tokens:
        loss_fn.similarity_fct = _scores
    loss_fn.model = model  # the trainer sets the wrapped model in the same way
    return loss_fn(_features(batch), None)


def _ranking(loss: str, module: ModuleType = losses, **options: Any) -> Problem:
    batch = {name: torch.randn(ROWS, IN) for name in _COLUMNS}
    return Problem(_Encoder(), batch, partial(_loss, loss, module, options), engine="ddp")


def _token_ranking(loss: str, module: ModuleType = losses_of_tokens, **options: Any) -> Problem:
    def reference_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        queries, *documents = [model(x)["token_embeddings"] for x in _features(batch)]
        return wb.reference.max_sim_loss(
            queries,
            torch.stack(documents, 1).flatten(0, 1),
            logit_scale=1.0,
            query_mask=batch["anchor_mask"],
            document_mask=torch.stack([batch["positive_mask"], batch["negative_mask"]], 1).flatten(0, 1),
            documents_per_query=2,
        )

    batch = tokens(anchor=4, positive=6, negative=6)
    own = module is ours
    rank_loss = partial(_loss, loss, module, options)
    return Problem(_TokenEncoder(), batch, rank_loss, reference=reference_loss, engine="ddp", uneven=own, empty=own)


_PLAIN, _CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
_TOKENS, _CACHED_TOKENS = f"MultiVector{_PLAIN}", "CachedMultiVectorMultipleNegativesRankingLoss"
_BOTH = ("query_to_doc", "doc_to_query")
SETTINGS: dict[str, Callable[[], Problem]] = {
    f"{_PLAIN}, default": partial(_ranking, _PLAIN),
    f"{_PLAIN}, gather_across_devices=True": partial(_ranking, _PLAIN, gather_across_devices=True),
    "the same, both directions": partial(_ranking, _PLAIN, gather_across_devices=True, directions=_BOTH),
    f"{_CACHED}, default": partial(_ranking, _CACHED, mini_batch_size=2),
    f"{_CACHED}, gather_across_devices=True": partial(_ranking, _CACHED, mini_batch_size=2, gather_across_devices=True),
    f"{_TOKENS}, default": partial(_token_ranking, _TOKENS),
    f"{_TOKENS}, gather_across_devices=True": partial(_token_ranking, _TOKENS, gather_across_devices=True),
    f"{_CACHED_TOKENS}, default": partial(_token_ranking, _CACHED_TOKENS, mini_batch_size=2),
    f"{_CACHED_TOKENS}, gather_across_devices=True": partial(
        _token_ranking, _CACHED_TOKENS, mini_batch_size=2, gather_across_devices=True
    ),
    f"{_PLAIN} of wholebatch.integrations": partial(_ranking, _PLAIN, ours),
    f"{_CACHED} of wholebatch.integrations": partial(_ranking, _CACHED, ours, mini_batch_size=2),
    f"{_TOKENS} of wholebatch.integrations": partial(_token_ranking, _TOKENS, ours),
    f"{_CACHED_TOKENS} of wholebatch.integrations": partial(_token_ranking, _CACHED_TOKENS, ours, mini_batch_size=2),
}
