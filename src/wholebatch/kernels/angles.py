"""The launchers of the kernels of angles between embeddings and the centers of their classes."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from .._base.normalize import EPS
from . import launch
from .launch import ONE_PASS, empty, laid_out, tiles

_ROWS, _FEATURES = 2, 128  # of a block: more rows spill registers
SAME = 16  # times eps: unit vectors that are nearer to each other than this count as equal


def target_chords(
    x: Tensor, centers: Tensor, targets: Tensor, clamp: tuple[bool, bool], index: Tensor | None
) -> Tensor:
    """Return |w|, |x - w| and |x + w| of each embedding and its target centers, (3, B, k), float64: see `heads.angles`.

    Where a center is on another rank, they are 0, 0 and 1.
    """
    numbers = empty(x, 3, *targets.shape, dtype=torch.float64)
    _run("target_chords", x, centers, targets, clamp, index, *numbers)
    return numbers


def target_gradients(
    x: Tensor,
    centers: Tensor,
    targets: Tensor,
    clamp: tuple[bool, bool],
    index: Tensor | None,
    *,
    chords: Sequence[Tensor],
    grads: tuple[Tensor, Tensor | None],
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dL/dx, (B, d), dL/dw of each pair, (B k, d), and its target, (B k,); None where not wanted.

    Where a center is on another rank, dL/dw is 0 and the target any.

    Args:
        x: as in :func:`target_chords`, as are the next four.
        centers: likewise.
        targets: likewise.
        clamp: likewise.
        index: likewise.
        chords: |x - w| and |x + w|, as it returned them.
        grads: by the angles and by the lengths, (B, k), float64; None: 0.
        wanted: which of both gradients.
    """
    x_grad = empty(x, *x.shape, dtype=x.dtype) if wanted[0] else None
    center_grads = empty(x, targets.numel(), x.shape[1], dtype=centers.dtype) if wanted[1] else None
    pair_targets = empty(x, targets.numel(), dtype=torch.int64) if wanted[1] else None
    num_targets = max(len(centers if index is None else index), 1)
    by_angles, by_lengths = (grad if grad is None or grad.stride(1) == 1 else grad.contiguous() for grad in grads)
    strides = [0 if grad is None else grad.stride(0) for grad in (by_angles, by_lengths)]
    numbers, same = (*strides, num_targets), SAME * torch.finfo(torch.float64).eps
    tensors = *chords, by_angles, by_lengths, x_grad, center_grads, pair_targets
    _run("target_gradients", x, centers, targets, clamp, index, *tensors, numbers=numbers, SAME=same)
    return x_grad, center_grads, pair_targets


def _run(
    kernel: str,
    x: Tensor,
    centers: Tensor,
    targets: Tensor,
    clamp: tuple[bool, bool],
    index: Tensor | None,
    *tensors: Tensor | None,
    numbers: tuple[int, ...] = (),
    **constants: float,
) -> None:
    x, centers, aligned = laid_out(x), laid_out(centers), gcd(16, x.shape[1])
    launch.run(
        getattr(tiles("angles"), kernel), -(-len(x) // _ROWS) or 1, x, centers, targets.contiguous(), index, *tensors,
        *targets.shape, x.shape[1] // aligned, x.stride(0) // aligned, centers.stride(0) // aligned, *numbers,
        CLAMP_X=clamp[0], CLAMP_W=clamp[1], EPS=EPS, ALIGNED=aligned, BM=_ROWS, BK=_FEATURES, **constants, **ONE_PASS,
    )  # fmt: skip
