"""Random affine maps of training images, which depend on (seed, step) and the row of the global batch alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wholebatch.app import UserError

from ..config import TrainConfig
from ..data.randomness import seeded
from ..encoders.inputs import Inputs
from ..encoders.networks import as_float


def affine_maps(batch_size: int, *, strength: float, step: int, seed: int) -> Tensor:
    """Return a small rotation, stretch and shift for every row of the global batch, (batch_size, 2, 3)."""
    angle, stretch_x, stretch_y, shift_x, shift_y = (
        0.06 * strength * (2 * torch.rand(5, batch_size, generator=seeded(seed, "augment", step)) - 1)
    )
    cos, sin = angle.cos(), angle.sin()
    first = torch.stack([cos * (1 + stretch_x), -sin * (1 + stretch_y), shift_x], dim=1)
    second = torch.stack([sin * (1 + stretch_x), cos * (1 + stretch_y), shift_y], dim=1)
    return torch.stack([first, second], dim=1)


def apply_maps(images: Tensor, maps: Tensor) -> Tensor:
    """Apply maps (b, 2, 3) to images (b, c, h, w) in [0, 1]; pixels from outside are 0."""
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def augmented(images: Inputs, config: TrainConfig, rows: slice, step: int) -> Inputs:
    """Apply the configured augmentation to these rows of the step's global batch, pixels (b, channels, h, w)."""
    if not config.augment:
        return images
    if not (isinstance(images, Tensor) and images.dim() == 4):
        raise UserError(
            f"--augment must be 0 with --image-encoder {config.image_encoder}, which reads other inputs than pixels "
            f"(b, channels, h, w), got {config.augment}"
        )
    images = as_float(images)
    maps = affine_maps(config.batch_size, strength=config.augment, step=step, seed=config.seed)
    return apply_maps(images, maps[rows].to(images.device))
