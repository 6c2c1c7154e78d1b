r"""Angles between embeddings and the centers of their classes, with an exact gradient, also near 0 and pi.

    theta = acos(c),  c = x . w        x, w normalized (see `_base.normalize`)
          = 2 atan2(a, b),        a^2 = |x - w|^2 + r,   b^2 = |x + w|^2 + r,   r = (1 - |x|^2) + (1 - |w|^2)

where r is 0 except for rows that were shorter than 1e-12. The second form is exact to rounding at any angle; the first
gives small angles to sqrt(eps) only. a and b are in the ratio of the sine and the cosine of theta / 2. The gradient is
a unit vector that already contains the projection of a normalized vector's gradient,

    d theta / dx = -(w - c x) / sin theta,        c = cos theta

No digits are lost if w - c x is computed as (w - x) + 2 sin^2(theta/2) x for small angles, and as
(w + x) - 2 cos^2(theta/2) x for large ones. For a row that was shorter than 1e-12 nothing is projected out, and
d theta / dx = -w / sin theta. So a margin is a smooth function of theta, and needs no clamp away from 0. At 0 and pi,
where x and w span no plane, the gradient has no direction; it is defined as 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import once_differentiable
from .._base.normalize import divisors, row_norms
from .._base.precision import rows_widened, wide_dtype
from ..kernels import angles as kernels
from .classes import NOT_HERE


@torch.no_grad()
def nearest(
    x: Tensor,
    centers: Tensor,
    rows: Tensor,
    *,
    clamp: tuple[bool, bool],
    index: Tensor | None = None,
    in_kernels: bool = False,
) -> Tensor:
    """Return the row of each embedding's nearest center among the given rows: (B, k, K) -> (B, k)."""
    if rows.shape[2] == 1:
        return rows[..., 0]
    angles, *_ = target_angles(x, centers, rows.flatten(1), clamp=clamp, index=index, in_kernels=in_kernels)
    return rows.gather(2, angles.view(rows.shape).argmin(2, keepdim=True))[..., 0]


def target_angles(
    x: Tensor,  # (B, d), embeddings of any length
    centers: Tensor,  # (C_r, d), of any length
    targets: Tensor,  # (B, k), the rows of the centers of each embedding's classes, or NOT_HERE
    *,
    clamp: tuple[bool, bool],  # whether embeddings, and centers, are divided by max(norm, 1e-12); else by their norm
    index: Tensor | None = None,  # (K_r,), ascending, the rows of `centers` that `targets` counts; None: all
    in_kernels: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the angle and length of each embedding's target center, and the centers for all further use.

    Angles and lengths are (B, k), float64, 0 if the center is on another rank. The caller must use the returned centers
    from here on: their gradient is then accumulated in one tensor. With `index` it must be sparse, with these rows.
    """
    return _Angles.apply(x, centers, targets, clamp, index, in_kernels)


class _Angles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        centers: Tensor,
        targets: Tensor,
        clamp: tuple[bool, bool],
        index: Tensor | None,
        in_kernels: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.clamp, ctx.in_kernels = clamp, in_kernels
        if in_kernels:
            numbers = kernels.target_chords(x, centers, targets, clamp, index)
        else:
            numbers = torch.zeros((3, *targets.shape), dtype=wide_dtype(x.device), device=x.device)
            for part, _, _, u, w in _pairs(x, centers, targets, clamp, index):
                torch.cat([w.norms, *_chords(u, w)], dim=1, out=numbers.view(3, -1).T[part])
                del u, w  # before the next ones are made
            numbers.mul_(targets != NOT_HERE)
            numbers[2].add_(targets == NOT_HERE)
        lengths, *chords = numbers
        ctx.save_for_backward(x, centers, targets, index, *chords)
        return 2 * torch.atan2(*chords), lengths, centers.view_as(centers)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, length_grads: Tensor | None, center_grads: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, centers, targets, index, *chords = ctx.saved_tensors
        want_x, want_centers = ctx.needs_input_grad[:2]
        grad = torch.zeros_like(chords[0]) if grad is None else grad
        sums = center_grads._values() if center_grads is not None and center_grads.is_sparse else center_grads
        if ctx.in_kernels:
            x_grad, pair_grads, pairs_targets = kernels.target_gradients(
                x, centers, targets, ctx.clamp, index,
                chords=chords, grads=(grad, length_grads), wanted=(want_x, want_centers),
            )  # fmt: skip
            if sums is not None and pair_grads is not None and pairs_targets is not None and len(sums):
                sums.index_add_(0, pairs_targets, pair_grads)
            return x_grad, center_grads if want_centers else None, None, None, None, None
        x_grad = torch.zeros_like(x) if want_x else None
        numbers = [z.reshape(-1, 1) for z in (*chords, grad)]
        if length_grads is not None:
            length_grads = (length_grads * (targets != NOT_HERE)).view(-1, 1)
        for part, cols, rows, u, w in _pairs(x, centers, targets, ctx.clamp, index):
            apart, together, weight = (z[part] for z in numbers)
            u_grads, w_grads = _directions_away(u, w, apart, together)
            if x_grad is not None:
                x_grad.index_add_(0, cols, u_grads.mul_(weight / u.divisors).to(x_grad.dtype))
            if sums is not None and want_centers:
                w_grads.mul_(weight / w.divisors)
                if length_grads is not None:
                    w_grads.addcmul_(w.units, length_grads[part] * w.divisors / w.norms)
                sums.index_add_(0, rows, w_grads.to(sums.dtype))
            del u, w, u_grads, w_grads  # before the next ones are made
        return x_grad, center_grads if want_centers else None, None, None, None, None


@dataclass(frozen=True)
class _Rows:
    """Rows with their norms, in float64; norms and divisors are (n, 1)."""

    units: Tensor  # the rows divided by their divisors
    norms: Tensor
    divisors: Tensor  # max(|x|, 1e-12), or |x|

    @classmethod
    def of(cls, x: Tensor, clamp: bool) -> _Rows:
        wide = x.to(wide_dtype(x.device))
        narrow = wide.dtype == torch.float64 != x.dtype  # no square overflows or underflows
        norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True) if narrow else row_norms(wide)
        divided_by = divisors(norms) if clamp else norms
        return cls(wide / divided_by, norms, divided_by)

    @property
    def missing(self) -> Tensor:
        """1 - |unit|^2, (n, 1), exactly 0 where the norm is 1."""
        return 1 - (self.norms / self.divisors).square()


def _chords(u: _Rows, w: _Rows) -> tuple[Tensor, Tensor]:
    """Return a and b of each row of u and the same row of w, (n, 1)."""
    x, y, missing = u.units, w.units, u.missing + w.missing
    apart, together = ((z.square().sum(1, keepdim=True) + missing).sqrt() for z in (x - y, x + y))
    return apart, together


def _directions_away(u: _Rows, w: _Rows, apart: Tensor, together: Tensor) -> tuple[Tensor, Tensor]:
    """Return d theta / dx of a unit x, the direction away from w, and d theta / dw; 0 for a center on another rank."""
    near, both = apart < together, apart.square() + together.square()
    half = torch.where(near, 2 * apart.square(), -2 * together.square()) / both
    sign = 1 - 2 * near.to(half.dtype)  # of x in w -+ x, which is short
    same = torch.minimum(apart, together) <= kernels.SAME * torch.finfo(half.dtype).eps
    slope = torch.where(same, 0.0, -both / (2 * apart * together))
    x, y = u.units, w.units
    away_from_w = torch.where(u.norms < u.divisors, y, torch.addcmul(y, sign, x).addcmul_(half, x))
    away_from_x = torch.where(w.norms < w.divisors, x, torch.addcmul(x, sign, y).addcmul_(half, y))
    return away_from_w.mul_(slope), away_from_x.mul_(slope)


def _pairs(
    x: Tensor, centers: Tensor, targets: Tensor, clamp: tuple[bool, bool], index: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor, _Rows, _Rows]]:
    """Yield some of all targets at a time: their place, that of their embeddings, they, and the rows of both.

    Rows of other ranks are not filtered out: the host would have to wait for the size of the result.
    """
    if not len(centers if index is None else index):
        return
    slots, most = targets.shape[1], rows_widened(x.shape[1], x.device)
    for start in range(0, targets.numel(), most):
        part = slice(start, min(start + most, targets.numel()))
        cols = torch.arange(part.start, part.stop, device=x.device) // slots
        rows = targets.reshape(-1)[part].clamp(min=0)
        center_rows = rows if index is None else index[rows]
        yield part, cols, rows, _Rows.of(x[cols], clamp[0]), _Rows.of(centers[center_rows], clamp[1])
