r"""Angles between embeddings and their own classes' centres, and their gradient where it is: also near 0 and pi.

    theta = 2 atan2(|x - w|, |x + w|),        x, w unit vectors

is exact to rounding at any angle, where acos(x . w) knows small ones to sqrt(eps) only. Its gradient is a unit vector,
and the projection that a normalised vector's gradient takes has been made,

    d theta / dx = -(w - c x) / sin theta,        c = cos theta

in which w - c x = (w - x) + 2 sin^2(theta/2) x for small angles, and (w + x) - 2 cos^2(theta/2) x for large ones, loses
no digits. So a margin is a smooth function of theta, and nothing has to be kept away from 0: only at 0 and pi
themselves, where x and w span no plane, is there no direction, and the gradient is taken for 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._once import once_differentiable
from .._precision import wide_dtype
from ..losses._towers import chunk
from .classes import NOT_HERE

_SAME = 16  # times eps: unit vectors that are nearer to each other are taken for the same


@torch.no_grad()
def nearest(x: Tensor, centres: Tensor, rows: Tensor) -> Tensor:
    """Of several rows of the centres, (B, k, K), that of the smallest angle with each embedding, (B, k)."""
    if rows.shape[2] == 1:
        return rows[..., 0]
    angles, *_ = target_angles(x, centres, rows.flatten(1))
    return rows.gather(2, angles.view(rows.shape).argmin(2, keepdim=True))[..., 0]


def target_angles(x: Tensor, centres: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The angle of each embedding with its class's centre, and the centres for whatever else is made of them.

    Args:
        x: (B, d), embeddings of any length.
        centres: (C_r, d), of any length.
        at: (B, k), the rows of the centres of each embedding's classes, or NOT_HERE.

    Returns:
        The angles, and the lengths of the centres, both (B, k), float64, 0 where the centre is not here; and the
        centres, whose other gradient is to arrive by these: it is taken on here, in place, and not stored twice.
    """
    angles, lengths, again = _Angles.apply(x, centres, at)
    return angles, lengths, again


class _Angles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, centres: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles, lengths = (torch.zeros(at.shape, dtype=wide_dtype(x.device), device=x.device) for _ in range(2))
        for cols, slots, rows, here in _pairs(at, len(centres)):
            u, (w, w_norm) = _unit(x[cols]), _unit_and_norm(centres[rows])
            lengths[cols, slots] = torch.where(here, w_norm[:, 0], 0.0)
            angles[cols, slots] = torch.where(here, 2 * torch.atan2(_length(u - w), _length(u + w)), 0.0)
        ctx.save_for_backward(x, centres, at, angles)
        return angles, lengths, centres.view_as(centres)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, of_lengths: Tensor, of_centres: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, centres, at, angles = ctx.saved_tensors
        of_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        for cols, slots, rows, here in _pairs(at, len(centres)):
            theta, weight, here = (of[:, None] for of in (angles[cols, slots], grad[cols, slots], here))
            (u, u_norm), (w, w_norm) = (_unit_and_norm(z) for z in (x[cols], centres[rows]))
            if of_x is not None:
                of_u = _away(u, w, theta) * weight / u_norm
                of_x.index_add_(0, cols, torch.where(here, of_u, 0.0).to(of_x.dtype))
            if ctx.needs_input_grad[1]:
                of_w = _away(w, u, theta) * weight / w_norm + w * of_lengths[cols, slots, None]
                of_centres.index_add_(0, rows, torch.where(here, of_w, 0.0).to(of_centres.dtype))
        return of_x, of_centres if ctx.needs_input_grad[1] else None, None


def _away(x: Tensor, w: Tensor, theta: Tensor) -> Tensor:
    """d theta / dx: the unit vector in which x leaves w."""
    near = theta < torch.pi / 2
    difference = torch.where(near, w - x, w + x)
    half = torch.where(near, 2 * (theta / 2).sin().square(), -2 * (theta / 2).cos().square())
    same = _length(difference)[:, None] <= _SAME * torch.finfo(x.dtype).eps
    return torch.where(same, 0.0, -(difference + half * x) / theta.sin())


def _pairs(at: Tensor, centres: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Embeddings and which of their classes, the centre's row, and whether it is here at all; some at a time.

    To leave out those that are not would make tensors whose size a host has to wait for.
    """
    if not centres:
        return
    for some in torch.arange(at.numel(), device=at.device).split(chunk(at.device) // 2):  # in float64
        cols, slots = some // at.shape[1], some % at.shape[1]
        rows = at[cols, slots]
        yield cols, slots, rows.clamp(min=0), rows != NOT_HERE


def _unit(x: Tensor) -> Tensor:
    return _unit_and_norm(x)[0]


def _unit_and_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.to(wide_dtype(x.device))
    norm = _length(x)[:, None]
    return x / norm, norm


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1)
