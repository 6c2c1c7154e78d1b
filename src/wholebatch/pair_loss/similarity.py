"""Similarities of rows: by matrix products in a tile, and from the two rows themselves for a single pair.

    dot                     s_ij = x_i . y_j
    cosine                  s_ij = x_i . y_j / (|x_i| |y_j|), by the rule of `_base.normalize`
    neg_squared_distance    s_ij = -|x_i - y_j|^2 = min(0, 2 x_i . y_j - |x_i|^2 - |y_j|^2)
    max_sim                 s_ij = sum_t max_u x_it . y_ju, rows and columns of several vectors ("tokens") each

In a tile, |x|^2 and |y|^2 are numbers of rows like any data: with a gradient, which reaches the features outside of the
sweep. A common vector is subtracted from all rows first. It changes no distance, and if it is the mean, the squares are
small, and so is the rounding of their difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import once_differentiable
from .._base.checks import check_choice
from .._base.normalize import normalized
from .._base.precision import rows_at_a_time
from .._base.settings import shown
from ..sweep import Documents

SIMILARITIES = ("dot", "cosine", "neg_squared_distance", "max_sim")
DISTANCE = "neg_squared_distance"
MAX_SIM = "max_sim"
MAX_SIM_OF_ROWS = "max_sim_of_rows"  # the same with rows and columns exchanged: each y_ju takes its best x_it
LATE: dict[str, Documents] = {MAX_SIM: "columns", MAX_SIM_OF_ROWS: "rows"}  # whose vectors compete
ONE = ""  # the name of the similarity where there is only one
# Similarities at which a logarithm, a root and a quotient are finite, and so are their slopes.
_SAFE = {"dot": 0.5, "cosine": 0.5, DISTANCE: -0.5, MAX_SIM: 0.5, MAX_SIM_OF_ROWS: 0.5}

Similarity = str | Mapping[str, str]


def kinds_of(similarity: object) -> dict[str, str]:
    """Return the kind of each similarity by its name, `ONE` if it has none.

    Raises:
        ValueError: for a similarity that does not exist.
    """
    if isinstance(similarity, Mapping):
        if not similarity:
            raise ValueError("similarity must name at least one similarity, got an empty mapping")
        for name, kind in similarity.items():
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                raise ValueError(f"similarity must have names like 'student', got {shown(name)}")
            check_choice(f"similarity[{name!r}]", kind, SIMILARITIES)
        if MAX_SIM in similarity.values():
            raise ValueError(
                f"similarity must be 'max_sim' alone, got {dict(similarity)}: rows have several vectors then; pass "
                "another model's similarities as data"
            )
        return dict(similarity)
    return {ONE: check_choice("similarity", similarity, SIMILARITIES)}


def safe_value(kind: str) -> float:
    """Return a similarity at which the usual functions and their slopes are finite."""
    return _SAFE[kind]


def multiplied(x: Tensor, kind: str, shift: Tensor | None = None) -> Tensor:
    """Return the rows whose products a tile holds."""
    if kind == "cosine":
        return normalized(x)
    return x - shift if kind == DISTANCE and shift is not None else x


def squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |x|^2 of each row, (rows,)."""
    x = x.to(dtype)
    return torch.linalg.vecdot(x, x)


def tile_similarities(kind: str, products: Tensor, row_squares: Tensor | None, col_squares: Tensor | None) -> Tensor:
    """Return the similarities of a tile, (m, n), from its products, (m, n), and squares, (m, 1) and (1, n)."""
    if kind != DISTANCE:
        return products
    assert row_squares is not None
    assert col_squares is not None
    return (2 * products - row_squares - col_squares).clamp(max=0)


def absolute(kind: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows whose similarity is sum_k |x_ik y_jk|, for distances -sum_k (|x_ik| + |y_jk|)^2, without gradient."""
    return x.detach().abs(), y.detach().abs() * (-1 if kind == DISTANCE else 1)


def rounding(s: Tensor, width: int, dtype: torch.dtype, error: float = 0.0) -> Tensor:
    """Return by how much BLAS may round a similarity whose rows have such an absolute one: copies round differently."""
    return s.abs() * ((4 + width**0.5 / 2) * torch.finfo(dtype).eps + error)


def pair_similarities(kind: str, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the similarity of each row of x with the same row of y, both from `multiplied`: 2 of (k, d) -> (k,).

    Two nodes have the two gradients, so that only one more matrix is held at a time.
    """
    distance = kind == DISTANCE
    similarities: Tensor = _OfPairs.apply(distance, x, y.detach(), dtype)
    return similarities if not y.requires_grad else _AlsoOf.apply(similarities, distance, x.detach(), y)


class _OfPairs(torch.autograd.Function):
    """x_i . y_i, or -|x_i - y_i|^2, a few rows at a time in a wider dtype; the gradient by x is in that of the rows."""

    @staticmethod
    def forward(ctx: Any, distance: bool, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.distance = distance
        ctx.save_for_backward(x, y)
        parts = []
        for a, b in zip(*(part.split(rows_at_a_time(part.device)) for part in (x, y)), strict=True):
            a, b = a.to(dtype), b.to(dtype)
            away = a - b if distance else None
            parts.append(torch.linalg.vecdot(a, b) if away is None else -torch.linalg.vecdot(away, away))
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, _gradient(grad, *ctx.saved_tensors, distance=ctx.distance), None, None


class _AlsoOf(torch.autograd.Function):
    """Similarities as they are, and the gradient by y."""

    @staticmethod
    def forward(ctx: Any, similarities: Tensor, distance: bool, x: Tensor, y: Tensor) -> Tensor:
        ctx.distance = distance
        ctx.save_for_backward(x, y)
        return similarities.view_as(similarities)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor]:
        x, y = ctx.saved_tensors
        return grad, None, None, _gradient(grad, y, x, distance=ctx.distance)


def _gradient(grad: Tensor, rows: Tensor, other: Tensor, *, distance: bool) -> Tensor:
    """Return the gradient by one of the rows: g_i other_i, or -2 g_i (rows_i - other_i)."""
    grad = grad.to(rows.dtype)[:, None]
    return (rows - other).mul_(-2 * grad) if distance else grad * other
