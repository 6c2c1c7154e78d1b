"""wholebatch: the catalog, declared losses, the head and caching, on any split of the rows, with ranks without rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb

from ...losses.catalog import CATALOG, Declaration
from ..problem import Problem
from . import declared_losses
from .encoders import IN, OUT, ROWS, OneTower, TwoTowers, labeled, two_towers, two_views

_ANY: dict[str, Any] = {"uneven": True, "empty": True, "engine": "mean"}


def _loss(entry: Declaration, **settings: Any) -> Problem:
    loss = entry.module(**entry.required_settings(OUT), **settings)
    if entry.kind == "labeled":
        return labeled(loss, **_ANY)
    if entry.kind == "views":
        return two_views(loss, **_ANY)

    def of_towers(x: Tensor, y: Tensor, scale: Tensor, *bias: Tensor) -> Tensor:
        value: Tensor = loss(x, y, logit_scale=scale, **({"logit_bias": bias[0]} if bias else {}))
        return value

    return two_towers(of_towers, bias=entry.needs_bias, **_ANY)


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
            value: Tensor = wb.functional.clip_loss(x, y, model.logit_scale.exp())
            return value

        return wb.GradCache([model.image, model.text], 2, loss)(batch["images"], batch["texts"])

    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN)}
    return Problem(model, batch, step=step, **_ANY)


_Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of image features, text features, scale and labels


def _recipe(call: _Call) -> Problem:
    def of_rank(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        x, y, scale = model(batch["images"], batch["texts"])
        return call(x, y, scale, batch["labels"])

    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN), "labels": torch.arange(ROWS) % 3}
    return Problem(TwoTowers(), batch, of_rank, **_ANY)


_RECIPES: dict[str, _Call] = {
    "FLOPSLoss": lambda x, y, scale, _: wb.recipes.FLOPSLoss()(scale * x * y),
    "SIGRegLoss": lambda x, y, scale, _: wb.recipes.SIGRegLoss()(scale * x * y, torch.eye(OUT, dtype=x.dtype)),
    "SameTaskInfoNCELoss": lambda x, y, scale, labels: wb.recipes.SameTaskInfoNCELoss()(
        x, y, labels, logit_scale=scale
    ),
    "SemiHardTripletLoss": lambda x, y, scale, labels: wb.recipes.SemiHardTripletLoss()(scale * x, scale * y, labels),
    "TowersLoss": lambda x, y, scale, _: wb.recipes.TowersLoss(towers=("image", "text"))(
        {"image": x, "text": y}, logit_scale=scale
    ),
}

SETTINGS: dict[str, Callable[[], Problem]] = {
    **{entry.module.__name__: partial(_loss, entry) for entry in CATALOG.values()},
    'CLIPLoss(exchange="ring")': partial(_loss, CATALOG["clip"], exchange="ring"),
    "PairLoss, x and y, a learned scale": lambda: declared_losses.two_towers(declared_losses.contrastive(), **_ANY),
    "PairLoss, x alone, a learned margin": partial(declared_losses.labeled, symmetric=False, **_ANY),
    "the same, symmetric": partial(declared_losses.labeled, symmetric=True, **_ANY),
    "PairLoss, data with a gradient, own candidates": partial(declared_losses.tempered, **_ANY),
    **{f"recipes.{name}": partial(_recipe, call) for name, call in _RECIPES.items()},
    "PartialFC, ArcFace": _head,
    "GradCache of CLIPLoss, chunks of 2": partial(_cached, dropout=False),
    "the same, with dropout": partial(_cached, dropout=True),
}
