"""The library's own losses, heads and caching: any split of the rows, ranks without rows included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb

from ..problem import Problem
from .encoders import IN, OUT, ROWS, OneTower, TwoTowers, labeled, two_towers, two_views

_ANY: dict[str, Any] = {"uneven": True, "empty": True, "engine": "mean"}


def _towers(make: Callable[[], Callable[..., Tensor]], *, bias: bool = False) -> Problem:
    return two_towers(make(), bias=bias, **_ANY)


def _by_scale(make: Callable[[], Callable[..., Tensor]]) -> Problem:
    loss = make()
    return two_towers(lambda x, y, scale: loss(x, y, logit_scale=scale), **_ANY)


def _views(make: Callable[[], Callable[..., Tensor]]) -> Problem:
    return two_views(make(), **_ANY)


def _labels(make: Callable[[], Callable[..., Tensor]]) -> Problem:
    return labeled(make(), **_ANY)


def _head() -> Problem:
    head = wb.PartialFC(OUT, 10, margin=wb.ArcFace(8.0, 0.3), seed=1)

    def of_rank(model: nn.ModuleDict, batch: Mapping[str, Tensor]) -> Tensor:
        (features,) = model["backbone"](batch["images"])
        loss: Tensor = model["head"](features, batch["labels"])
        return loss

    batch = {"images": torch.randn(ROWS, IN), "labels": torch.arange(ROWS) % 10}
    return Problem(nn.ModuleDict({"backbone": OneTower(), "head": head}), batch, of_rank, **_ANY)


def _cached(*, dropout: bool) -> Problem:
    model = TwoTowers()
    if dropout:
        model.image.append(nn.Dropout(0.2))

    def step(model: TwoTowers, batch: Mapping[str, Tensor]) -> Tensor:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            x, y = (normalize(z, dim=1) for z in (x, y))
            found: Tensor = wb.functional.clip_loss(x, y, model.logit_scale.exp())
            return found

        return wb.GradCache([model.image, model.text], 2, loss)(batch["images"], batch["texts"])

    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN)}
    return Problem(model, batch, step=step, **_ANY)


SETTINGS: dict[str, Callable[[], Problem]] = {
    "CLIPLoss": partial(_towers, wb.CLIPLoss),
    'CLIPLoss(exchange="ring")': partial(_towers, partial(wb.CLIPLoss, exchange="ring")),
    "SigLIPLoss": partial(_towers, wb.SigLIPLoss, bias=True),
    "InfoNCELoss": partial(_by_scale, wb.InfoNCELoss),
    "MatryoshkaLoss": partial(_by_scale, partial(wb.MatryoshkaLoss, dims=(2, OUT))),
    "NTXentLoss": partial(_views, wb.NTXentLoss),
    "DCLLoss": partial(_views, wb.DCLLoss),
    "BarlowTwinsLoss": partial(_views, wb.BarlowTwinsLoss),
    "VICRegLoss": partial(_views, wb.VICRegLoss),
    "SupConLoss": partial(_labels, wb.SupConLoss),
    "MultiSimilarityLoss": partial(_labels, wb.MultiSimilarityLoss),
    "CircleLoss": partial(_labels, wb.CircleLoss),
    "PartialFC, ArcFace": _head,
    "GradCache of CLIPLoss, chunks of 2": partial(_cached, dropout=False),
    "the same, with dropout": partial(_cached, dropout=True),
}
