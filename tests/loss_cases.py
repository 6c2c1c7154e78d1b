"""The table of losses that the tests run over: adding a loss is adding a row.

A row says how to call a loss and its twin alike, `call(functions, *features, scale, bias, **options)`, with `functions`
either `wb.functional` or `wb.reference`, and what it takes besides the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.partition import Partition


@dataclass(frozen=True)
class Case:
    """A loss with its options."""

    call: Callable[..., Tensor]
    negatives: Callable[[int], int] | None = None  # rows of negatives on each rank
    has_bias: bool = False  # whether the bias reaches the loss
    normalises: bool = False


def clip(f: ModuleType, x: Tensor, y: Tensor, scale: Any, bias: Any, **options: Any) -> Tensor:
    return f.clip_loss(x, y, scale, logit_bias=bias, **options)


def clip_smoothed(f: ModuleType, x: Tensor, y: Tensor, scale: Any, bias: Any, **options: Any) -> Tensor:
    return f.clip_loss(x, y, scale, logit_bias=bias, label_smoothing=0.2, **options)


def info_nce(f: ModuleType, x: Tensor, y: Tensor, scale: Any, _bias: Any, **options: Any) -> Tensor:
    return f.info_nce_loss(x, y, logit_scale=scale, **options)


def info_nce_negatives(
    f: ModuleType, x: Tensor, y: Tensor, n: Tensor, scale: Any, _bias: Any, **options: Any
) -> Tensor:
    return f.info_nce_loss(x, y, logit_scale=scale, negatives=n, **options)


def nt_xent(f: ModuleType, x: Tensor, y: Tensor, scale: Any, _bias: Any, **options: Any) -> Tensor:
    return f.nt_xent_loss(x, y, temperature=1 / scale, **options)


def siglip(f: ModuleType, x: Tensor, y: Tensor, scale: Any, bias: Any, **options: Any) -> Tensor:
    return f.siglip_loss(x, y, scale, bias, **options)


LOSSES = {
    "clip": Case(clip),
    "clip, label smoothing": Case(clip_smoothed),
    "info_nce": Case(info_nce),
    "info_nce, few negatives": Case(info_nce_negatives, negatives=lambda rank: (3 * rank + 1) % 4),
    "info_nce, no negatives on any rank": Case(info_nce_negatives, negatives=lambda _: 0),
    "nt_xent": Case(nt_xent, normalises=True),
    "siglip": Case(siglip, has_bias=True),
}
BIAS = -2.5


def whole_batch(case: Case, counts: tuple[int, ...], *, d: int = 6, seed: int = 0) -> list[Tensor]:
    """Features of all ranks in float64: pairs that are neither random nor solved."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), d, dtype=torch.float64, generator=generator)
    y = x + 1.5 * torch.randn(sum(counts), d, dtype=torch.float64, generator=generator)
    features = [x, y]
    if case.negatives is not None:
        rows = sum(map(case.negatives, range(len(counts))))
        features.append(torch.randn(rows, d, dtype=torch.float64, generator=generator))
    return features if case.normalises else [normalize(z, dim=-1) for z in features]


def rows_of(case: Case, counts: tuple[int, ...], rank: int) -> list[slice]:
    """Where a rank's rows of each matrix of features are."""
    own = Partition(counts).rows(rank)
    if case.negatives is None:
        return [own, own]
    return [own, own, Partition(tuple(map(case.negatives, range(len(counts))))).rows(rank)]


def gradients(case: Case, functions: ModuleType, features: list[Tensor], scale: Tensor, **options: Any) -> list[Tensor]:
    """The loss; and its gradients with respect to the features, the scale and, where it has one, the bias."""
    leaves = [z.detach().clone().requires_grad_() for z in features]
    scale = scale.detach().clone().requires_grad_()
    bias = torch.full_like(scale, BIAS).requires_grad_()
    loss = case.call(functions, *leaves, scale, bias, **options)
    wanted = [*leaves, scale, bias] if case.has_bias else [*leaves, scale]
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


def dense(case: Case, features: list[Tensor], scale: float) -> list[Tensor]:
    """What `gradients` gives for the twin, in float64."""
    return gradients(case, wb.reference, [z.double() for z in features], torch.tensor(scale, dtype=torch.float64))
