"""Losses of images and texts, whose row i belongs to row i of the other tower."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._shared import check_shapes, cross_entropy, positives_and_excluded, reduce


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    ids: Tensor | None = None,
    equal_ids: str = "positive",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the symmetric cross-entropy between images and texts (Radford et al., 2021, arXiv:2103.00020, figure 3).

    S = logit_scale * X Y^T + logit_bias,    L = (CE(S, diagonal) + CE(S^T, diagonal)) / 2

    With ids, the targets are all pairs of equal ids (Yang et al., 2022, arXiv:2204.03610, equation 3).

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(clip_loss(x, x, 10.0).item(), 9)
    9.0796e-05
    """
    check_shapes("clip_loss", {"image_features": image_features, "text_features": text_features}, ids, weights)
    logits = logit_scale * image_features @ text_features.T
    if logit_bias is not None:
        logits = logits + logit_bias
    positive, excluded = positives_and_excluded(len(logits), ids, equal_ids, logits.device)
    rows = cross_entropy(logits, positive, excluded, label_smoothing)
    cols = cross_entropy(logits.T, positive, excluded, label_smoothing)
    return reduce((rows + cols) / 2, weights, reduction)


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    equal_ids: str = "positive",
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the binary cross-entropy of all pairs (Zhai et al., 2023, arXiv:2303.15343, algorithm 1).

    S = logit_scale * X Y^T + logit_bias,    L = -sum_ij log sigmoid(z_ij S_ij) / B,    z_ij = 1 if i = j, else -1

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(siglip_loss(x, x, 10.0, -5.0).item(), 9)
    0.020146045
    """
    check_shapes("siglip_loss", {"image_features": image_features, "text_features": text_features}, ids, weights)
    logits = logit_scale * image_features @ text_features.T + logit_bias
    positive, excluded = positives_and_excluded(len(logits), ids, equal_ids, logits.device)
    losses = -F.logsigmoid((2.0 * positive - 1) * logits)
    return reduce(losses.masked_fill(excluded, 0).sum(1), weights, reduction)


def distillation_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    teacher_image_features: Tensor,
    teacher_text_features: Tensor,
    teacher_logit_scale: Tensor | float,
    *,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross-entropy against the softmax of a teacher (Wu et al., 2023, arXiv:2309.12314, equation 7).

    L = (CE(S, softmax(T)) + CE(S^T, softmax(T^T))) / 2

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(distillation_loss(x, x, 10.0, x, x, 2.0).item(), 9)
    2.130230374
    """
    check_shapes(
        "distillation_loss",
        {"image_features": image_features, "text_features": text_features},
        teacher_image_features,
        weights,
    )
    teacher_features = {
        "teacher_image_features": teacher_image_features,
        "teacher_text_features": teacher_text_features,
    }
    check_shapes("distillation_loss", teacher_features)
    student = logit_scale * image_features @ text_features.T
    teacher = (teacher_logit_scale * teacher_image_features @ teacher_text_features.T).detach()
    rows, cols = (-(t.softmax(1) * s.log_softmax(1)).sum(1) for s, t in ((student, teacher), (student.T, teacher.T)))
    return reduce((rows + cols) / 2, weights, reduction)


def global_contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    image_log_averages: Tensor,
    text_log_averages: Tensor,
    *,
    temperature: Tensor | float = 0.07,
    gamma: float = 0.9,
    epsilon: float = 1e-14,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return CLIP's loss with moving averages for sums (Yuan et al., 2022, arXiv:2202.12387, algorithm 1).

    u <- (1 - gamma) u + gamma g,    L = t/2 mean [ log(e + u) + log(e + v) ] with dL = t/2 mean [ dg / (e + u) + ... ]

    The second and the third value are log u and log v after this batch.

    >>> x, new = torch.eye(3, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64)
    >>> round(global_contrastive_loss(x, x, new, new, temperature=0.5)[0].item(), 9)
    -1.0
    """
    check_shapes(
        "global_contrastive_loss",
        {"image_features": image_features, "text_features": text_features},
        image_log_averages,
        text_log_averages,
        weights,
    )
    similarities, n = image_features @ text_features.T, len(image_features)
    other = ~torch.eye(n, dtype=torch.bool, device=similarities.device)
    if n == 1:
        return 0 * reduce(similarities[0] / temperature, weights, reduction), image_log_averages, text_log_averages
    losses, after = [], []
    for rows, before in ((similarities, image_log_averages), (similarities.T, text_log_averages)):
        g = (((rows - rows.diagonal()[:, None]) / temperature).exp() * other).sum(1) / (n - 1)
        u = torch.where(before.isneginf(), g, (1 - gamma) * before.exp() + gamma * g).detach()
        losses.append(temperature * ((epsilon + u).log() + (g - g.detach()) / (epsilon + u)))
        after.append(u.log())
    return reduce((losses[0] + losses[1]) / 2, weights, reduction), after[0], after[1]
