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

from .config import TrainConfig

# (wholebatch.functional, or wholebatch.reference; features of images and of texts, scale, bias, names) -> L
_Call = Callable[[Any, Tensor, Tensor, Tensor, Any, Tensor], Tensor]


class Objective(nn.Module):
    """A loss of a batch's features, with the same call for every loss."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor, Any, Tensor], Tensor]) -> None:
        super().__init__()
        self._call = call

    def forward(self, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, names: Tensor) -> Tensor:
        """Return L of features (b_r, d) and (b_r, d), scale (), bias () or None, and each row's text index, (b_r,)."""
        loss = self._call(images, texts, scale, bias, names)
        return loss + 0 * scale  # DDP expects a gradient of the scale, even if the loss has none


class _WithHistory(Objective):
    """The loss that keeps sums of earlier batches."""

    def __init__(self, loss: wb.GlobalContrastiveLoss) -> None:
        super().__init__(lambda x, y, _s, _b, n: loss(x, y, n))
        self.loss = loss


def make_objective(config: TrainConfig, texts: int, *, dense: bool = False) -> Objective:
    """Make the loss of the global batch, with every loss's default `sync`: DDP averages over ranks.

    Args:
        config: the configuration of the run.
        texts: number of texts in all.
        dense: take the reference implementation, which this process computes alone.
    """
    if config.loss == "global_contrastive" and not dense:
        return _WithHistory(wb.GlobalContrastiveLoss(texts, temperature=1 / config.model.initial_logit_scale))
    functions = wb.reference if dense else wb.functional
    return Objective(partial(_call(config), functions))


def _call(config: TrainConfig) -> _Call:
    d, fixed = config.model.embedding_size, 1 / config.model.initial_logit_scale
    all_directions = ("query_to_key", "key_to_query", "query_to_query", "key_to_key")
    dims = sorted({max(1, d // part) for part in (8, 4, 2, 1)})
    calls: dict[str, _Call] = {
        "clip": lambda f, x, y, s, _b, _n: f.clip_loss(x, y, s, label_smoothing=config.label_smoothing),
        "siglip": lambda f, x, y, s, b, _n: f.siglip_loss(x, y, s, b),
        "info_nce": lambda f, x, y, s, _b, _n: f.info_nce_loss(x, y, logit_scale=s, directions=all_directions),
        "matryoshka": lambda f, x, y, s, _b, _n: f.matryoshka_loss(x, y, logit_scale=s, dims=dims),
        "nt_xent": lambda f, x, y, s, _b, _n: f.nt_xent_loss(x, y, temperature=1 / s),
        "sup_con": lambda f, x, y, s, _b, n: f.sup_con_loss(_both(x, y), n, temperature=1 / s),
        "dcl": lambda f, x, y, *_: f.dcl_loss(x, y, temperature=fixed),
        "debiased": lambda f, x, y, *_: f.debiased_loss(x, y, temperature=fixed, tau_plus=1e-3, beta=0.5),
        "global_contrastive": lambda f, x, y, *_: _without_history(f, x, y, fixed),
        "triplet": lambda f, x, y, _s, _b, n: f.triplet_loss(_both(x, y), n, margin=0.0, smooth=True),
        "multi_similarity": lambda f, x, y, _s, _b, n: f.multi_similarity_loss(_both(x, y), n),
        "circle": lambda f, x, y, _s, _b, n: f.circle_loss(_both(x, y), n),
        "smooth_ap": lambda f, x, y, _s, _b, n: f.smooth_ap_loss(_both(x, y), n),
        "barlow_twins": lambda f, x, y, *_: f.barlow_twins_loss(x, y),
        "vicreg": lambda f, x, y, *_: f.vicreg_loss(x * d**0.5, y * d**0.5),  # entries of variance 1
        "w_mse": lambda f, x, y, *_: f.w_mse_loss(x, y, epsilon=1e-2),
    }
    return calls[config.loss]


def _both(images: Tensor, texts: Tensor) -> Tensor:
    return torch.stack([images, texts], dim=1)


def _without_history(functions: Any, images: Tensor, texts: Tensor, temperature: float) -> Tensor:
    """Return the global contrastive loss of a first step, without sums of earlier batches."""
    nothing = images.new_full((len(images),), float("-inf"), dtype=torch.float64)
    loss: Tensor = functions.global_contrastive_loss(images, texts, nothing, nothing, temperature=temperature)[0]
    return loss
