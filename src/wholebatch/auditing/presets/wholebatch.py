"""wholebatch: the catalog, declared losses, the head and caching, on any split of the rows, with ranks without rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

import wholebatch as wb

from ...losses.catalog import CATALOG, Declaration
from ..problem import Problem
from .encoders import IN, OUT, ROWS, OneTower, TwoTowers, labeled, mlp, problem, two_towers, two_views

_ANY: dict[str, Any] = {"uneven": True, "empty": True, "engine": "mean"}
_CANDIDATES = 2  # own ones of each row


def _loss(entry: Declaration, **settings: Any) -> Problem:
    loss = entry.module(**entry.required_settings(OUT), **settings)
    if entry.kind == "labeled":
        return labeled(loss, **_ANY)
    if entry.kind == "views":
        return two_views(loss, **_ANY)

    def tower_loss(x: Tensor, y: Tensor, scale: Tensor, *bias: Tensor) -> Any:
        return loss(x, y, logit_scale=scale, **({"logit_bias": bias[0]} if bias else {}))

    return two_towers(tower_loss, bias=entry.needs_bias, **_ANY)


def _head() -> Problem:
    head = wb.PartialFC(OUT, 10, margin=wb.ArcFace(8.0, 0.3), seed=1)

    def rank_loss(model: nn.ModuleDict, batch: Mapping[str, Tensor]) -> Any:
        (features,) = model["backbone"](batch["images"])
        return model["head"](features, batch["labels"])

    batch = {"images": torch.randn(ROWS, IN), "labels": torch.arange(ROWS) % 10}
    return Problem(nn.ModuleDict({"backbone": OneTower(), "head": head}), batch, rank_loss, **_ANY)


def _cached(*, dropout: bool) -> Problem:
    model = TwoTowers()
    if dropout:
        model.image.append(nn.Dropout(0.2))

    def step(model: TwoTowers, batch: Mapping[str, Tensor]) -> Tensor:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            x, y = (normalize(z, dim=1) for z in (x, y))
            return wb.functional.clip_loss(x, y, model.logit_scale.exp())

        return wb.GradCache([model.image, model.text], 2, loss)(batch["images"], batch["texts"])

    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN)}
    return Problem(model, batch, step=step, **_ANY)


# Declared losses: what is learned, and how rows meet columns, differs.


def _others(x: Any, y: Any) -> Any:
    return x.index != y.index


def _same(x: Any, y: Any) -> Any:
    return (x.label == y.label) & _others(x, y)


def _contrastive() -> Problem:
    """Return a problem for rows and columns with a learned scale, and partners in the scores."""
    loss_fn = wb.PairLoss(
        {
            "rows": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * (s - x.partner)),
            "cols": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * (s - y.partner)),
        },
        lambda r, x, p: r.rows / 2,
        column_loss=lambda r, y, p: r.cols / 2,
        parameters={"scale": nn.Parameter(torch.tensor(4.0))},
    )

    def rank_loss(model: nn.ModuleDict, batch: Mapping[str, Tensor]) -> Any:
        x, y, _ = model["towers"](batch["images"], batch["texts"])
        return model["loss"](x, y)

    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN)}
    towers = TwoTowers()
    towers.logit_scale.requires_grad_(False)  # the loss has its own
    return Problem(nn.ModuleDict({"towers": towers, "loss": loss_fn}), batch, rank_loss, **_ANY)


def _with_margin(*, symmetric: bool) -> Problem:
    """Return a problem for rows among themselves, with labels, a learned margin, and a distance."""
    loss_fn = wb.PairLoss(
        {
            "far": wb.terms.LogSumExp(lambda s, x, y, p: (1e-9 - s).sqrt(), where=_same),
            "near": wb.terms.LogSumExp(lambda s, x, y, p: p.margin - (1e-9 - s).sqrt(), where=_others),
        },
        lambda r, x, p: softplus(r.far + r.near),
        similarity="neg_squared_distance",
        symmetric=symmetric,
        parameters={"margin": nn.Parameter(torch.tensor(1.0))},
    )

    def rank_loss(model: nn.ModuleDict, batch: Mapping[str, Tensor]) -> Any:
        (x,) = model["tower"](batch["images"])
        return model["loss"](x, x_data={"label": batch["labels"]})

    batch = {"images": torch.randn(ROWS, IN), "labels": torch.arange(ROWS) % 3}
    return Problem(nn.ModuleDict({"tower": OneTower(), "loss": loss_fn}), batch, rank_loss, **_ANY)


def _tempered() -> Problem:
    """Return a problem with a predicted temperature of each row, and own candidates beside those of the batch."""
    loss_fn = wb.PairLoss(
        {
            "all": wb.terms.LogSumExp(lambda s, x, y, p: s / x.temperature, over="both"),
            "own": wb.terms.Partner(lambda s, x, y, p: s / x.temperature),
        },
        lambda r, x, p: r.all - r.own,
        similarity="cosine",
    )

    def rank_loss(model: nn.ModuleDict, batch: Mapping[str, Tensor]) -> Any:
        x, y, own = (model["tower"](x.flatten(0, -2))[0] for x in batch.values())
        temperature = 0.5 + softplus(model["temperature"](batch["images"])[:, 0])
        candidates = own.view(len(x), _CANDIDATES, OUT)
        return model["loss"](x, y, x_data={"temperature": temperature}, candidates=candidates)

    model = nn.ModuleDict({"tower": OneTower(), "temperature": mlp(), "loss": loss_fn})
    names = {"images": (ROWS, IN), "texts": (ROWS, IN), "candidates": (ROWS, _CANDIDATES, IN)}
    return Problem(model, {name: torch.randn(shape) for name, shape in names.items()}, rank_loss, **_ANY)


_Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of image features, text features, scale and labels


def _recipe(call: _Call) -> Problem:
    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN), "labels": torch.arange(ROWS) % 3}
    return problem(TwoTowers(), call, batch, beside=("labels",), **_ANY)


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
    "PairLoss, x and y, a learned scale": _contrastive,
    "PairLoss, x alone, a learned margin": partial(_with_margin, symmetric=False),
    "the same, symmetric": partial(_with_margin, symmetric=True),
    "PairLoss, data with a gradient, own candidates": _tempered,
    **{f"recipes.{name}": partial(_recipe, call) for name, call in _RECIPES.items()},
    "PartialFC, ArcFace": _head,
    "GradCache of CLIPLoss, chunks of 2": partial(_cached, dropout=False),
    "the same, with dropout": partial(_cached, dropout=True),
}
