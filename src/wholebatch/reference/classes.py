"""The loss of a classification head, with all logits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.normalize import EPS, row_norms
from ..heads.margins import CurricularFace
from ..heads.margins.interface import Margin, Regularizes, Targets, TransformsNegatives
from ._shared import check_shapes, normalized, reduce


def partial_fc_loss(
    embeddings: Tensor,
    labels: Tensor,
    centers: Tensor,
    *,
    margin: Margin,
    margin_grad: str = "exact",
    normalize: str = "both",
    bias: Tensor | None = None,
    class_ids: Tensor | None = None,
    log_weights: Tensor | None = None,
    exclude_above: float | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the softmax cross-entropy over classes with a margin (An et al., 2020, arXiv:2010.05222).

    L_i = -log softmax_j(s c_ij, with s phi(c_iy) for the label's class),    c: cosines of embeddings and centers

    With centers (C, K, d), the nearest of a class's K counts. Logits are multiplied by the norms of embeddings or of
    centers that are not normalized, and a bias is added.

    >>> from wholebatch import CosFace
    >>> x = torch.eye(3, 4)
    >>> round(partial_fc_loss(x, torch.arange(3), x, margin=CosFace(4.0, 0.5)).item(), 4)
    0.2395
    """
    check_shapes(
        "partial_fc_loss", {"embeddings": embeddings, "centers": centers.flatten(0, -2)}, labels, weights, paired=False
    )
    labels = labels.view(len(labels), -1).to(torch.int64)  # torch takes -1 for 255 in uint8
    counted = labels != ignore_index
    ids = torch.arange(len(centers), device=labels.device) if class_ids is None else class_ids
    target = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    centers = centers.view(len(centers), -1, centers.shape[-1])
    unit_embeddings, unit_centers = (normalize in ("both", side) for side in ("embeddings", "centers"))
    units = normalized(embeddings, EPS if unit_embeddings else 0.0)
    directions = normalized(centers, EPS if unit_centers else 0.0)
    sub_center_angles = [_angles(units[:, None], directions[classes]) for classes in target.unbind(1)]
    angles = torch.stack([angles.min(1).values for angles in sub_center_angles], 1)
    norms, lengths = row_norms(embeddings).to(units), row_norms(centers)[:, 0, 0].to(units)
    targets = Targets(angles, norms)
    phi = margin(targets)
    if margin_grad == "straight_through":
        phi = angles.cos() + (phi - angles.cos()).detach()
    cosines = (units @ directions.flatten(0, 1).T).unflatten(1, directions.shape[:2]).max(2).values
    if isinstance(margin, CurricularFace):
        hard = cosines > (angles + margin.m).cos()
        cosines = torch.where(hard, cosines * (margin.t + cosines), cosines)
    elif isinstance(margin, TransformsNegatives):
        cosines = _transformed(margin, cosines, angles.detach())
    n = torch.ones_like(norms) if unit_embeddings else norms
    m = torch.ones_like(lengths) if unit_centers else lengths
    b = torch.zeros_like(lengths) if bias is None else bias
    logits = margin.s * cosines * n * m + b + (0 if log_weights is None else log_weights)
    target_logits = margin.s * phi * n * m[target] + b[target]
    if exclude_above is not None:
        logits = logits.masked_fill(cosines > exclude_above, float("-inf"))
    positive = (counted[:, :, None] & (target[:, :, None] == torch.arange(len(ids), device=target.device))).any(1)
    negatives = logits.masked_fill(positive, float("-inf"))
    losses = []
    for classes, target_logit in zip(target.unbind(1), target_logits.unbind(1), strict=True):
        label_logits = negatives.scatter(1, classes[:, None], target_logit[:, None].to(negatives))
        log_p, counts = label_logits.log_softmax(1), label_logits > float("-inf")
        mean = torch.where(counts, log_p, 0.0).sum(1) / counts.sum(1)
        nll = -log_p.gather(1, classes[:, None])[:, 0]
        losses.append((1 - label_smoothing) * nll - label_smoothing * mean if label_smoothing else nll)
    per_label = torch.stack(losses, 1)
    if isinstance(margin, Regularizes):
        per_label = per_label + margin.regularizer(targets)
    per_row = torch.where(counted, per_label, 0.0).sum(1) / counted.sum(1).clamp(min=1)
    some = counted.any(1)
    if reduction == "none":
        return reduce(per_row, weights, reduction)
    return reduce(per_row[some], weights if weights is None else weights[some], reduction)


def _transformed(margin: Any, cosines: Tensor, angles: Tensor) -> Tensor:
    """Return the cosines of negatives that the margin puts in their place, with the slope that it declares."""
    z, everything = margin.s * cosines.detach().T, slice(0, len(cosines))
    transform = margin.of_negatives(angles)
    value, slope = (change(z.clone(), everything).T for change in (transform.transform_, transform.slope_))
    return value / margin.s + slope * (cosines - cosines.detach())


def _angles(x: Tensor, w: Tensor) -> Tensor:
    """Return acos(x . w) of normalized rows (Kahan, 2006, How futile are mindless assessments of roundoff, section 12).

    At 0 and pi its derivative is 0. Rows that were shorter than 1e-12 have a norm below 1, which is made up for.
    """
    eps = torch.finfo(x.dtype).eps
    missing = sum(torch.where(1 - z.square().sum(-1) > 16 * eps, 1 - z.square().sum(-1), 0.0) for z in (x, w))
    squares = [z.square().sum(-1) + missing for z in (x - w, x + w)]
    apart, together = (torch.where(s <= (16 * eps) ** 2, 0.0, s.clamp(min=(16 * eps) ** 2).sqrt()) for s in squares)
    return 2 * torch.atan2(apart, together)
