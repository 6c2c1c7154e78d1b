"""The losses of `--loss`: each compares images with texts, or both with each other.

For losses of two views, an image and its name are two views of one character; for losses of labeled examples, both are
examples of the class of that name. A loss with a scale learns it, unless the loss could be lowered by scaling alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.app.tensors import CATALOG

from ..config import TrainConfig

_Call = Callable[..., Tensor]
"""(features of images and of texts, scale, bias, names) -> L; in front of these, of `_call`, the library's functions"""


class Objective(nn.Module):
    """A loss of a batch's features, with the same call for every loss."""

    def __init__(self, call: _Call, history: nn.Module | None = None) -> None:
        super().__init__()
        self._call, self.loss = call, history

    def forward(
        self, first: Tensor, second: Tensor, scale: Tensor, bias: Tensor | None, names: Tensor, **negatives: Tensor
    ) -> Tensor:
        """Return L of features (b_r, d) and (b_r, d), scale (), bias () or None, and each row's group, (b_r,)."""
        loss = self._call(first, second, scale, bias, names, **negatives)
        return loss + 0 * scale  # DDP expects a gradient of the scale, even if the loss has none


def make_objective(config: TrainConfig, texts: int, *, negatives: bool = False, dense: bool = False) -> Objective:
    """Make the loss of the global batch, with every loss's default `sync`: DDP averages over ranks."""
    if config.loss == "global_contrastive" and not dense:
        history = wb.GlobalContrastiveLoss(texts, temperature=1 / config.model.initial_logit_scale)
        return Objective(lambda x, y, _scale, _bias, names: history(x, y, names), history)
    call = _loss_with_negatives if negatives else _call(config)
    return Objective(partial(call, wb.reference if dense else wb.functional))


def _loss_with_negatives(
    functions: Any, queries: Tensor, documents: Tensor, scale: Tensor, _: None, names: Tensor, *, negatives: Tensor,
    negative_names: Tensor,
) -> Tensor:  # fmt: skip
    """Return InfoNCE among the documents and the mined negatives (n_r, d) of all ranks.

    A negative with the name of a query, (n_r,), is a stated positive of it, and left out.
    """
    loss: Tensor = functions.info_nce_loss(
        queries, documents, logit_scale=scale, negatives=negatives, query_ids=names, negative_ids=negative_names
    )
    return loss


# Settings that suit this application, where they are not the loss's defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "info_nce": {"directions": ("query_to_key", "key_to_query", "query_to_query", "key_to_key")},
    "debiased": {"tau_plus": 1e-3, "beta": 0.5},
    "triplet": {"margin": 0.0, "smooth": True},
    "w_mse": {"epsilon": 1e-2},
}


def _call(config: TrainConfig) -> _Call:
    fixed = config.model.initial_logit_scale
    if config.loss == "global_contrastive":
        return lambda f, x, y, *_: _loss_without_history(f, x, y, 1 / fixed)
    entry = CATALOG[config.loss]
    settings = {"label_smoothing": config.label_smoothing} if config.loss == "clip" else SETTINGS.get(config.loss, {})
    factor = config.model.embedding_size**0.5 if config.loss == "vicreg" else 1.0  # entries of variance 1

    def call(functions: Any, x: Tensor, y: Tensor, scale: Tensor, bias: Any, names: Tensor) -> Tensor:
        scale_here = fixed if entry.scale == "fixed" else scale
        return entry.call(functions, factor * x, factor * y, scale=scale_here, bias=bias, labels=names, **settings)

    return call


def _loss_without_history(functions: Any, images: Tensor, texts: Tensor, temperature: float) -> Tensor:
    """Return the global contrastive loss of a first step, without sums of earlier batches."""
    nothing = images.new_full((len(images),), float("-inf"), dtype=torch.float64)
    loss: Tensor = functions.global_contrastive_loss(images, texts, nothing, nothing, temperature=temperature)[0]
    return loss
