"""Declared losses, each with encoders and a batch: what is learned, and how rows meet columns, differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import wholebatch as wb

from ..problem import Problem
from .encoders import IN, OUT, ROWS, OneTower, TwoTowers, mlp

_Batch = Mapping[str, Tensor]
_TEMPERED, _OWN = "temperature", "negatives"
OWN = 2  # own candidates of each row


def _others(x: Any, y: Any) -> Tensor:
    differs: Tensor = x.index != y.index
    return differs


def _same(x: Any, y: Any) -> Tensor:
    is_same: Tensor = (x.label == y.label) & _others(x, y)
    return is_same


def two_towers(loss_fn: wb.PairLoss, **options: Any) -> Problem:
    """Return a problem for a declared loss of images and texts that learns its own parameters."""

    def of_rank(model: nn.ModuleDict, batch: _Batch) -> Tensor:
        x, y, _ = model["towers"](batch["images"], batch["texts"])
        loss: Tensor = model["loss"](x, y)
        return loss

    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN)}
    towers = TwoTowers()
    towers.logit_scale.requires_grad_(False)  # the loss has its own
    return Problem(nn.ModuleDict({"towers": towers, "loss": loss_fn}), batch, of_rank, **options)


def contrastive() -> wb.PairLoss:
    """Return a loss of rows and of columns with a learned scale, and partners in the scores."""
    return wb.PairLoss(
        {
            "rows": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * (s - x.partner)),
            "cols": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * (s - y.partner)),
        },
        lambda r, x, p: r.rows / 2,
        column_loss=lambda r, y, p: r.cols / 2,
        parameters={"scale": nn.Parameter(torch.tensor(4.0))},
    )


def labeled(*, symmetric: bool, **options: Any) -> Problem:
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

    def of_rank(model: nn.ModuleDict, batch: _Batch) -> Tensor:
        (x,) = model["tower"](batch["images"])
        loss: Tensor = model["loss"](x, x_data={"label": batch["labels"]})
        return loss

    batch = {"images": torch.randn(ROWS, IN), "labels": torch.arange(ROWS) % 3}
    return Problem(nn.ModuleDict({"tower": OneTower(), "loss": loss_fn}), batch, of_rank, **options)


def tempered(**options: Any) -> Problem:
    """Return a problem with a predicted temperature of each row, and own candidates beside those of the batch."""
    loss_fn = wb.PairLoss(
        {
            "all": wb.terms.LogSumExp(lambda s, x, y, p: s / x.temperature, over="both"),
            "own": wb.terms.Partner(_tempered),
        },
        lambda r, x, p: r.all - r.own,
        similarity="cosine",
    )

    def of_rank(model: nn.ModuleDict, batch: _Batch) -> Tensor:
        x, y, own = (model["tower"](batch[name].flatten(0, -2))[0] for name in ("images", "texts", _OWN))
        temperature = 0.5 + softplus(model[_TEMPERED](batch["images"])[:, 0])
        loss: Tensor = model["loss"](x, y, x_data={_TEMPERED: temperature}, candidates=own.view(len(x), OWN, OUT))
        return loss

    model = nn.ModuleDict({"tower": OneTower(), _TEMPERED: mlp(), "loss": loss_fn})
    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN), _OWN: torch.randn(ROWS, OWN, IN)}
    return Problem(model, batch, of_rank, **options)


def _tempered(s: Tensor, x: Any, y: Any, p: Any) -> Tensor:
    scaled: Tensor = s / x.temperature
    return scaled
