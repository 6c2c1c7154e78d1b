"""Losses of labeled examples: rows with the same label are positives of each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._shared import cross_entropy, labeled_cosines, normalized, reduce


def sup_con_loss(
    features: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return each row's mean cross-entropy of its positives (Khosla et al., 2020, arXiv:2004.11362, equation 2).

    S = Z Z^T / temperature,    L_i = logsumexp_{j != i} S_ij - mean_{p in P(i)} S_ip,    mean over rows with positives

    >>> round(sup_con_loss(torch.eye(3, dtype=torch.float64), torch.tensor([0, 0, 1]), temperature=0.5).item(), 9)
    0.693147181
    """
    cosines, positive, itself = labeled_cosines(features, labels)
    return reduce(cross_entropy(cosines / temperature, positive, itself), weights, reduction, positive.any(1))


def multi_similarity_loss(
    features: Tensor,
    labels: Tensor,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return soft maxima over positives and over negatives (Wang et al., 2019, arXiv:1904.06627, equations 9 and 10).

    L_i = log(1 + sum_p exp(-alpha (c_ip - base))) / alpha + log(1 + sum_n exp(beta (c_in - base))) / beta

    >>> round(multi_similarity_loss(torch.eye(3, dtype=torch.float64), torch.tensor([0, 0, 1])).item(), 9)
    0.437753896
    """
    cosines, positive, itself = labeled_cosines(features, labels)
    negative = ~positive & ~itself
    if epsilon is not None:
        nearest = cosines.masked_fill(~negative, -torch.inf).amax(1, keepdim=True).detach()
        farthest = cosines.masked_fill(~positive, torch.inf).amin(1, keepdim=True).detach()
        positive, negative = positive & (cosines < nearest + epsilon), negative & (cosines > farthest - epsilon)
    positive_sums = (torch.exp(-alpha * (cosines - base)) * positive).sum(1)
    negative_sums = (torch.exp(beta * (cosines - base)) * negative).sum(1)
    return reduce(positive_sums.log1p() / alpha + negative_sums.log1p() / beta, weights, reduction)


def circle_loss(
    features: Tensor,
    labels: Tensor,
    *,
    m: float = 0.4,
    gamma: float = 80.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return circle loss, which weights pairs by need (Sun et al., 2020, arXiv:2002.10857, equations 6 to 8).

    L_i = softplus(logsumexp_n gamma [c + m]_+ (c - m) + logsumexp_p -gamma [1 + m - c]_+ (c - 1 + m))

    >>> round(circle_loss(torch.eye(3, dtype=torch.float64), torch.tensor([0, 0, 1])).item(), 9)
    54.4
    """
    cosines, positive, itself = labeled_cosines(features, labels)
    negative = ~positive & ~itself
    fixed = cosines.detach()
    negative_logits = gamma * (fixed + m).clamp(min=0) * (cosines - m)
    positive_logits = -gamma * (1 + m - fixed).clamp(min=0) * (cosines - 1 + m)
    both = positive.any(1) & negative.any(1)
    exponents = [
        logits.masked_fill(~among, -torch.inf)[both].logsumexp(1)
        for logits, among in ((negative_logits, negative), (positive_logits, positive))
    ]
    losses = torch.zeros(len(cosines), dtype=cosines.dtype, device=cosines.device)
    losses = losses.index_put((both.nonzero()[:, 0],), F.softplus(exponents[0] + exponents[1], threshold=40))
    return reduce(losses, weights, reduction, both)


def triplet_loss(
    features: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.2,
    smooth: bool = False,
    distance: str = "euclidean",
    normalize: bool = True,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return a hinge on the hardest positive and negative (Hermans et al., 2017, arXiv:1703.07737, equation 5).

    L_i = max(0, max_p D_ip - min_n D_in + margin), or its softplus; mean over rows that have both

    >>> round(triplet_loss(torch.eye(3, dtype=torch.float64), torch.tensor([0, 0, 1])).item(), 9)
    0.2
    """
    cosines, positive, itself = labeled_cosines(features, labels)
    z = features.flatten(0, -2)
    z = normalized(z) if normalize or distance == "cosine" else z
    differences = torch.linalg.vector_norm((z[:, None] - z).masked_fill(itself[..., None], 1), dim=2)
    away = {"euclidean": differences, "squared": differences.square(), "cosine": 1 - cosines}[distance]
    negative = ~positive & ~itself
    both = positive.any(1) & negative.any(1)
    far = away.masked_fill(~positive, -torch.inf).amax(1).masked_fill(~both, 0)
    near = away.masked_fill(~negative, torch.inf).amin(1).masked_fill(~both, 0)
    losses = F.softplus(far - near + margin, threshold=40) if smooth else F.relu(far - near + margin)
    return reduce(losses.masked_fill(~both, 0), weights, reduction, both)


def smooth_ap_loss(
    features: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return 1 - average precision with sigmoids for ranks (Brown et al., 2020, arXiv:2007.12163, equations 5 and 6).

    L_i = 1 - mean_p (1 + sum over other positives of s(c_iq - c_ip)) / (1 + sum over others of s(c_ij - c_ip))

    >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]], dtype=torch.float64)
    >>> round(smooth_ap_loss(z, torch.tensor([0, 1, 0]), temperature=0.1).item(), 9)
    0.480785833
    """
    cosines, positive, itself = labeled_cosines(features, labels)
    # larger[i, p, j]: whether j is more similar to i than p is
    larger = ((cosines[:, None, :] - cosines[:, :, None]) / temperature).sigmoid()
    larger = larger * ~itself[None] * ~itself[:, None]
    precision = (1 + (larger * positive[:, None]).sum(2)) / (1 + larger.sum(2))
    losses = 1 - (precision * positive).sum(1) / positive.sum(1).clamp(min=1)
    return reduce(losses.masked_fill(~positive.any(1), 0), weights, reduction, positive.any(1))
