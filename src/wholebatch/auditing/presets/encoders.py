"""Small encoders and batches for presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..problem import Engine, Problem

ROWS, IN, OUT = 12, 6, 5


def mlp(width: int = IN) -> nn.Sequential:
    """A network with one hidden layer."""
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, OUT))


class TwoTowers(nn.Module):
    """Two encoders with features of norm 1, a learned scale and, if asked for, a learned bias."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.image, self.text = mlp(), mlp()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0)) if bias else None

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        """Encode (b, IN), (b, IN) -> (b, OUT), (b, OUT), scale, and the bias if there is one."""
        features = (normalize(self.image(images), dim=1), normalize(self.text(texts), dim=1))
        rest = () if self.logit_bias is None else (self.logit_bias,)
        return *features, self.logit_scale.exp(), *rest


class Encoder(nn.Module):
    """One encoder; each subclass calls it as its losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()


class OneTower(Encoder):
    """One encoder for all views."""

    def forward(self, *views: Tensor) -> tuple[Tensor, ...]:
        """Encode views of (b, IN) in one pass: (b, OUT) each."""
        parts: tuple[Tensor, ...] = self.encoder(torch.cat(views)).chunk(len(views))
        return parts


def tokens(**longest: int) -> dict[str, Tensor]:
    """Return columns of texts, (ROWS, longest, IN), and their masks, (ROWS, longest), named with `_mask`.

    Each column's first rows are the longest, and the others have two tokens or more.
    """
    columns = {}
    for name, length in longest.items():
        lengths = torch.randint(2, length + 1, (ROWS,)).sort(descending=True).values
        lengths[::4] = length  # so all parts of the batch have padding of the same width
        columns[name] = torch.randn(ROWS, length, IN)
        columns[f"{name}_mask"] = torch.arange(length) < lengths[:, None]
    return columns


def problem(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Mapping[str, Tensor],
    *,
    beside: Sequence[str] = (),
    engine: Engine = "ddp",
    **options: Any,
) -> Problem:
    """Return a problem for a loss of a model's outputs, and then of the columns that it does not take, `beside`."""

    def rank_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        columns = [x for name, x in batch.items() if name not in beside]
        return loss(*model(*columns), *(batch[name] for name in beside))

    return Problem(model, batch, rank_loss, engine=engine, **options)


def two_towers(loss: Callable[..., Tensor], *, bias: bool = False, **options: Any) -> Problem:
    """Return a problem for a loss of image features, text features, scale and perhaps bias."""
    batch = {"images": torch.randn(ROWS, IN), "texts": torch.randn(ROWS, IN)}
    return problem(TwoTowers(bias=bias), loss, batch, **options)


def two_views(loss: Callable[..., Tensor], **options: Any) -> Problem:
    """Return a problem for a loss of two views of the same examples."""
    view = torch.randn(ROWS, IN)
    batch = {"view_0": view, "view_1": view + 0.3 * torch.randn(ROWS, IN)}
    return problem(OneTower(), loss, batch, **options)


def labeled(loss: Callable[..., Tensor], **options: Any) -> Problem:
    """Return a problem for a loss of features and labels."""
    batch = {"images": torch.randn(ROWS, IN), "labels": torch.arange(ROWS) % 3}
    return problem(OneTower(), loss, batch, beside=("labels",), **options)
