"""Declared losses as functions of (rows, embedding_size), for `wholebatch plan --loss` and `wholebatch bench loss`.

wholebatch plan --loss benchmarks/declared_losses.py:clip --batch-size 8192 --embedding-size 512
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

import declared  # noqa: E402

import wholebatch as wb  # noqa: E402

Call = tuple[wb.PairLoss, dict[str, Any]]


def _scalars(**values: float) -> dict[str, Any]:
    return {"parameters": {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}}


def _labels(rows: int) -> dict[str, Tensor]:
    return {"label": torch.randint(0, max(2, rows // 8), (rows,))}


def clip(rows: int, embedding_size: int) -> Call:
    """Rows and columns, with partners in the scores."""
    return declared.clip(), _scalars(scale=14.3)


def info_nce(rows: int, embedding_size: int) -> Call:
    """Rows only."""
    return declared.info_nce(), _scalars(scale=14.3)


def siglip(rows: int, embedding_size: int) -> Call:
    """A score that is not affine."""
    return declared.siglip(), _scalars(scale=14.3, bias=-10.0)


def sup_con(rows: int, embedding_size: int) -> Call:
    """Half of a symmetric matrix, with masks."""
    return declared.sup_con(symmetric=True), {"x_data": _labels(rows), "parameters": {"scale": 14.3}}


def lifted(rows: int, embedding_size: int) -> Call:
    """Distances, of rows among themselves."""
    terms = {
        "far": wb.terms.LogSumExp(lambda s, x, y, p: (1e-9 - s).sqrt(), where=declared.same),
        "near": wb.terms.LogSumExp(lambda s, x, y, p: p.margin - (1e-9 - s).sqrt(), where=declared.different),
    }
    loss_fn = wb.PairLoss(
        terms,
        lambda r, x, p: softplus(r.far + r.near),
        similarity="neg_squared_distance",
        parameters={"margin": 1.0},
    )
    return loss_fn, {"y": None, "x_data": _labels(rows)}


def mined(rows: int, embedding_size: int) -> Call:
    """Three own candidates of each row beside those of the batch."""
    own = normalize(torch.randn(rows, 3, embedding_size), dim=2).requires_grad_()
    return declared.info_nce_with_hard_negatives(), {"candidates": own, **_scalars(scale=14.3)}
