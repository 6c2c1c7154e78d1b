"""The losses that `--loss` offers: each a way to compare images with texts, or both with themselves.

Losses of two views take an image and its name for two views of one character; those of labelled examples take both for
examples of the class that is the name. What needs a scale learns it, unless the loss would gain by scaling alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb

from .config import TrainConfig

_Call = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, Tensor], Tensor]


class Objective(nn.Module):
    """A loss of a batch's features, whatever it makes of them; the same call for all."""

    def __init__(self, loss: nn.Module, call: _Call) -> None:
        super().__init__()
        self.loss, self._call = loss, call

    def forward(self, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, names: Tensor) -> Tensor:
        """(b_r, d), (b_r, d), (), () or None, and which text each row has, (b_r,) -> L."""
        loss = self._call(self.loss, images, texts, scale, bias, names)
        return loss + 0 * scale  # so that an engine finds the scale used, where the loss has none


def make_objective(config: TrainConfig, texts: int) -> Objective:
    """The loss of the global batch; on several ranks DDP averages, which is every loss's default.

    Args:
        config: of the run.
        texts: how many there are in all.
    """
    d, scale = config.model.feature_size, config.model.initial_logit_scale
    fixed = 1 / scale
    losses: dict[str, tuple[Callable[[], nn.Module], _Call]] = {
        "clip": (lambda: wb.CLIPLoss(label_smoothing=config.label_smoothing), lambda f, x, y, s, _b, _n: f(x, y, s)),
        "siglip": (wb.SigLIPLoss, lambda f, x, y, s, b, _n: f(x, y, s, b)),
        "info_nce": (
            lambda: wb.InfoNCELoss(directions=("query_to_key", "key_to_query", "query_to_query", "key_to_key")),
            lambda f, x, y, s, _b, _n: f(x, y, logit_scale=s),
        ),
        "matryoshka": (
            lambda: wb.MatryoshkaLoss(dims=sorted({max(1, d // part) for part in (8, 4, 2, 1)})),
            lambda f, x, y, s, _b, _n: f(x, y, logit_scale=s),
        ),
        "nt_xent": (nn.Identity, lambda _f, x, y, s, _b, _n: wb.functional.nt_xent_loss(x, y, temperature=1 / s)),
        "sup_con": (
            nn.Identity,
            lambda _f, x, y, s, _b, n: wb.functional.sup_con_loss(_both(x, y), n, temperature=1 / s),
        ),
        "dcl": (lambda: wb.DCLLoss(temperature=fixed), lambda f, x, y, *_: f(x, y)),
        "debiased": (
            lambda: wb.DebiasedLoss(temperature=fixed, tau_plus=1e-3, beta=0.5),
            lambda f, x, y, *_: f(x, y),
        ),
        "global_contrastive": (
            lambda: wb.GlobalContrastiveLoss(texts, temperature=fixed),
            lambda f, x, y, _s, _b, n: f(x, y, n),
        ),
        "triplet": (lambda: wb.TripletLoss(margin=0.0, smooth=True), _labelled),
        "multi_similarity": (wb.MultiSimilarityLoss, _labelled),
        "circle": (wb.CircleLoss, _labelled),
        "smooth_ap": (wb.SmoothAPLoss, _labelled),
        "barlow_twins": (wb.BarlowTwinsLoss, lambda f, x, y, *_: f(x, y)),
        "vicreg": (wb.VICRegLoss, lambda f, x, y, *_: f(x * d**0.5, y * d**0.5)),  # entries of variance 1
        "w_mse": (lambda: wb.WMSELoss(epsilon=1e-2), lambda f, x, y, *_: f(x, y)),
    }
    make, call = losses[config.loss]
    return Objective(make(), call)


def _both(images: Tensor, texts: Tensor) -> Tensor:
    return torch.stack([images, texts], dim=1)


def _labelled(loss: nn.Module, images: Tensor, texts: Tensor, _scale: Tensor, _bias: Any, names: Tensor) -> Tensor:
    found: Tensor = loss(_both(images, texts), names)
    return found
