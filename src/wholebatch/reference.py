"""The dense, single-process, differentiable twin of every loss: what the library's exactness is measured against.

Each twin takes the whole batch, stores the whole similarity matrix, and is short enough to be checked by eye
against its paper. Tests, docs and doubting users all call the same ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["clip_loss"]


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Symmetric cross-entropy between images and texts (Radford et al., 2021, arXiv:2103.00020, figure 3).

    S = logit_scale * X Y^T + logit_bias,    L = (CE(S, diagonal) + CE(S^T, diagonal)) / 2

    Args:
        image_features: X, (B, d), as they are: the caller normalises.
        text_features: Y, (B, d); row i belongs to row i of X.
        logit_scale: multiplies the similarities (1 / temperature); a number or a tensor of one element.
        logit_bias: added to every logit; softmax ignores it.
        label_smoothing: weight of the uniform distribution in both targets, as in `F.cross_entropy`.

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(clip_loss(x, x, 10.0).item(), 9)
    9.0796e-05
    """
    logits = logit_scale * image_features @ text_features.T
    if logit_bias is not None:
        logits = logits + logit_bias
    targets = torch.arange(len(logits), device=logits.device)
    rows = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    cols = F.cross_entropy(logits.T, targets, label_smoothing=label_smoothing)
    return (rows + cols) / 2
