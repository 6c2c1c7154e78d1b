"""The dense, single-process, differentiable twin of every loss: what the library's exactness is measured against.

Each twin takes the whole batch, stores the whole similarity matrix, and is short enough to be checked by eye
against its paper. Tests, docs and doubting users all call the same ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["clip_loss", "info_nce_loss", "nt_xent_loss", "siglip_loss"]


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


def info_nce_loss(
    queries: Tensor, keys: Tensor, *, logit_scale: Tensor | float, negatives: Tensor | None = None
) -> Tensor:
    """Each query's key among all keys and negatives (van den Oord et al., 2018, arXiv:1807.03748, equation 4).

    S = logit_scale * Q [K; N]^T,    L = CE(S, i)

    Args:
        queries: Q, (B, d), as they are: the caller normalises.
        keys: K, (B, d) or more rows; row i is the positive of query i, further rows are negatives.
        logit_scale: multiplies the similarities (1 / temperature); a number or a tensor of one element.
        negatives: N, (n, d), further keys that are nobody's positive.

    >>> q = torch.eye(3, dtype=torch.float64)
    >>> round(info_nce_loss(q, q, logit_scale=10.0, negatives=-q).item(), 9)
    0.000181585
    """
    if negatives is not None:
        keys = torch.cat([keys, negatives])
    return F.cross_entropy(logit_scale * queries @ keys.T, torch.arange(len(queries), device=queries.device))


def nt_xent_loss(z0: Tensor, z1: Tensor, *, temperature: Tensor | float = 0.1) -> Tensor:
    """Each row's other view among all other rows (Chen et al., 2020, arXiv:2002.05709, equation 1).

    S = Z Z^T / temperature without its diagonal,    Z = normalize([Z0; Z1]),    L = CE(S, other view)

    Args:
        z0: (B, d), the first view; rows are normalised here.
        z1: (B, d), the second view; row i is another view of row i of z0.
        temperature: divides the cosines; a number or a tensor of one element.

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(nt_xent_loss(z, z, temperature=0.5).item(), 9)
    0.432652903
    """
    z = F.normalize(torch.cat([z0, z1]), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z0)))


def siglip_loss(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float, logit_bias: Tensor | float
) -> Tensor:
    """Binary cross-entropy of every pair (Zhai et al., 2023, arXiv:2303.15343, algorithm 1).

    S = logit_scale * X Y^T + logit_bias,    L = -sum_ij log sigmoid(z_ij S_ij) / B,    z_ij = 1 if i = j, else -1

    Args:
        image_features: X, (B, d), as they are: the caller normalises.
        text_features: Y, (B, d); row i belongs to row i of X.
        logit_scale: multiplies the similarities; a number or a tensor of one element.
        logit_bias: added to every logit; a number or a tensor of one element.

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(siglip_loss(x, x, 10.0, -5.0).item(), 9)
    0.020146045
    """
    logits = logit_scale * image_features @ text_features.T + logit_bias
    signs = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum() / len(logits)
