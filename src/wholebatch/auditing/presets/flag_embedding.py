"""FlagEmbedding: the loss of a model, of local rows and of all processes, and that of this library in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from FlagEmbedding.finetune.embedder.encoder_only.base import BiEncoderOnlyEmbedderModel
from torch import Tensor, nn

from ...integrations import flag_embedding
from ..problem import Problem
from .encoders import IN, ROWS, Encoder

_GROUP = 3  # passages of each query, the positive first


class _Tokens(Encoder):
    """A base model with one hidden state per row."""

    def forward(self, rows: Tensor, attention_mask: Tensor, return_dict: bool = True) -> SimpleNamespace:
        """Encode (b, IN) -> (b, 1, OUT)."""
        return SimpleNamespace(last_hidden_state=self.encoder(rows)[:, None])


class _Theirs(BiEncoderOnlyEmbedderModel):
    """The model with tensors in place of texts."""

    def __init__(self, *, distilled: bool, cross: bool) -> None:
        super().__init__(
            _Tokens(),
            temperature=0.2,
            normalize_embeddings=True,
            negatives_cross_device=cross,
            kd_loss_type="kl_div",
        )
        self.distilled = distilled

    def forward(self, queries: Tensor, passages: Tensor, teacher: Tensor) -> Any:
        """Return the loss of (b, IN) queries, (b, k, IN) passages and the (b, k) scores of a teacher."""
        features = [{"rows": x, "attention_mask": x} for x in (queries, passages.flatten(0, 1))]
        return super().forward(*features, teacher.flatten().tolist() if self.distilled else None).loss


class _Ours(_Theirs):
    """The same with the method that `enable()` puts there."""

    _compute_cross_device_neg_loss = flag_embedding.cross_device_loss


def _problem(model: type[_Theirs], *, distilled: bool = False, cross: bool = True) -> Problem:
    def rank_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        return model(*batch.values())

    batch = {
        "queries": torch.randn(ROWS, IN),
        "passages": torch.randn(ROWS, _GROUP, IN),
        "teacher": torch.randn(ROWS, _GROUP),
    }
    return Problem(model(distilled=distilled, cross=cross), batch, rank_loss, engine="ddp")


_CROSS = "--negatives_cross_device True"
SETTINGS: dict[str, Callable[[], Problem]] = {
    "default: negatives of local rows": partial(_problem, _Theirs, cross=False),
    _CROSS: partial(_problem, _Theirs),
    f"{_CROSS}, distillation by kl_div": partial(_problem, _Theirs, distilled=True),
    f"{_CROSS}, by wholebatch.integrations": partial(_problem, _Ours),
    f"{_CROSS}, distillation by kl_div, by wholebatch.integrations": partial(_problem, _Ours, distilled=True),
}
