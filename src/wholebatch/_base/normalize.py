r"""The rule by which rows are normalized: that of `torch.nn.functional.normalize`, in value and in gradient.

    z = x / max(|x|, eps),    eps = 1e-12

With g = dL/dz, the gradient is that of the same function:

    |x| >= eps:    dL/dx = (g - z <z, g>) / |x|        the part of g along x is removed
    |x| <  eps:    dL/dx = g / eps                     z = x / eps is linear in x: nothing is removed

A row of zeros stays a row of zeros, and its gradient is g / eps. Only rows with |x| >= eps have norm 1 afterward, so
norm 1 is an upper bound, and code must not assume it.

The row is first multiplied by a power of two that moves its largest entry into [1, 2). Then its square neither
overflows nor underflows, and since the factor is exact, all other norms keep their bits. The computation is in the
accumulation dtype: only the norm itself must be representable there.

Losses, heads and `wholebatch.reference` all take the rule from here. `wholebatch.jax`, which imports no torch, has the
same one in `products`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .autograd import no_autocast, once_differentiable
from .precision import accumulation_dtype, rows_at_a_time

EPS = 1e-12  # as in torch.nn.functional.normalize
UNIT = 1.001  # bound of a norm after division and rounding
LONGEST = {torch.float32: 1e9, torch.float64: 1e100}  # products of rows up to this norm stay well within range
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


def normalize_rows(x: Tensor, eps: float = EPS) -> Tensor:
    """Return x / max(|x|, eps) for each row of the last dimension, in the accumulation dtype; differentiable twice.

    The second derivative at a row of zeros is NaN, as that of `torch.nn.functional.normalize` is.

    >>> normalize_rows(torch.tensor([[3e30, 4e30], [0.0, 0.0], [3e-13, 4e-13]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000],
            [0.3000, 0.4000]])
    """
    x = x.to(accumulation_dtype(x.dtype))
    return x / row_norms(x).clamp(min=eps)


def row_norms(x: Tensor) -> Tensor:
    """Return |x| of each row of the last dimension, (..., 1), in the accumulation dtype; its gradient at 0 is 0."""
    x = x.to(accumulation_dtype(x.dtype))
    power = _power_of_two(x)
    return torch.linalg.vector_norm(x * power, dim=-1, keepdim=True) / power


@torch.no_grad()
def known_norms(x: Tensor, index: Tensor | None = None) -> Tensor:
    """Return |x| of each row of a matrix, or of those in `index`, (rows, 1), without a gradient; x is not copied."""
    most = rows_at_a_time(x.device)
    if index is not None:
        return torch.cat([row_norms(x.index_select(0, some)) for some in index.split(most)])
    return row_norms(x) if len(x) <= most else torch.cat([row_norms(some) for some in x.split(most)])


def divisors(norms: Tensor) -> Tensor:
    """Return max(|x|, eps), the divisors of rows with these norms."""
    return norms.clamp(min=EPS)


@torch.no_grad()
def project_(grad: Tensor, z: Tensor, norms: Tensor, *, divide: bool = False, index: Tensor | None = None) -> None:
    """Turn dL/dz into dL/dx in place: the adjoint of `normalize_rows`, derived above.

    Args:
        grad: dL/dz, (rows, d).
        z: (rows, d); with `divide` it is x.
        norms: |x|, (rows, 1), not clamped.
        divide: whether z is x, still to be divided by its norms.
        index: (rows,), the rows of z that are meant; None: all.
    """
    each = (t.split(rows_at_a_time(z.device)) for t in (grad, z if index is None else index, norms))
    for g, unit, norm in zip(*each, strict=True):
        unit = unit if index is None else z.index_select(0, unit)
        divisor = divisors(norm)
        unit = unit / divisor if divide else unit
        along = torch.linalg.vecdot(unit, g).unsqueeze(1)
        g.addcmul_(unit, torch.where(norm >= EPS, along, 0.0), value=-1).div_(divisor)


def normalized(x: Tensor) -> Tensor:
    """Return the rows of a matrix as `normalize_rows` does, with less memory; differentiable once."""
    z: Tensor = _Normalized.apply(x)
    return z


class _Normalized(torch.autograd.Function):
    """Normalized rows, a few at a time: both passes hold one matrix beside the result."""

    @staticmethod
    @no_autocast
    def forward(ctx: Any, x: Tensor) -> Tensor:
        z, norms = torch.empty_like(x, dtype=accumulation_dtype(x.dtype)), known_norms(x)
        for z_rows, rows, norm in zip(*(part.split(rows_at_a_time(x.device)) for part in (z, x, norms)), strict=True):
            torch.div(rows.to(z.dtype), divisors(norm), out=z_rows)
        ctx.dtype = x.dtype
        ctx.save_for_backward(z, norms)
        return z

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        projected = grad.clone(memory_format=torch.contiguous_format)
        project_(projected, *ctx.saved_tensors)
        return (projected.to(ctx.dtype),)


def inverse_norms(x: Tensor, dims: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return 1 / max(|x[:m]|, eps) for each m, (rows, parts), of rows with norms up to `LONGEST`; differentiable.

    The squares are clamped and not the norms: the derivative of a square root at 0 is infinite.
    """
    parts = x.to(dtype).split(part_sizes(dims, x.shape[1]), dim=1)[: len(dims)]
    squares = torch.stack([part.square().sum(1) for part in parts], dim=1).cumsum(1)
    return squares.clamp(min=EPS**2).rsqrt()


def part_sizes(dims: Sequence[int], width: int) -> list[int]:
    """Return the number of features between consecutive ends of parts: 0, dims, width."""
    return [stop - start for start, stop in pairwise([0, *dims, width])]


def _power_of_two(x: Tensor) -> Tensor:
    """Return the power of two that brings each row's largest entry to [1, 2), (..., 1); near it for extreme rows."""
    info, (integers, exponent) = torch.finfo(x.dtype), _EXPONENT[x.dtype]
    largest = torch.linalg.vector_norm(x.detach(), float("inf"), dim=-1, keepdim=True)
    largest = largest.clamp(info.tiny**0.75, info.max**0.75)
    return (largest.view(integers) & exponent).view(x.dtype).reciprocal_()  # without its mantissa
