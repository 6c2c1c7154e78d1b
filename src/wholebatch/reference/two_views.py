"""Losses of two views of each example, where each row is compared with all rows of both views."""

from __future__ import annotations

import torch
from torch import Tensor

from ._shared import cross_entropy, normalized, reduce, two_view_logits


def nt_xent_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return each row's cross-entropy over all other rows (Chen et al., 2020, arXiv:2002.05709, equation 1).

    S = Z Z^T / temperature without its diagonal,    Z = normalize([Z0; Z1]),    L = CE(S, other view)

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(nt_xent_loss(z, z, temperature=0.5).item(), 9)
    0.432652903
    """
    logits, positive, excluded = two_view_logits(z0, z1, temperature, ids)
    losses = cross_entropy(logits, positive, excluded)
    return reduce(losses.unflatten(0, (2, -1)).mean(0), weights, reduction)


def dcl_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    sigma: float | None = None,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return each row's logsumexp over negatives minus its positive (Yeh et al., 2021, arXiv:2110.06848, equation 6).

    L_i = logsumexp over negatives of S_ij - w_i S_{i p(i)},    w_i = 2 - B softmax_i(cos_i / sigma) or 1

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(dcl_loss(z, z, temperature=0.5).item(), 9)
    -0.613705639
    """
    logits, positive, excluded = two_view_logits(z0, z1, temperature, ids)
    negatives = logits.masked_fill(excluded | positive, -torch.inf)
    weight = torch.ones(len(z0), dtype=logits.dtype, device=z0.device)
    if sigma is not None:
        cosines = (normalized(z0) * normalized(z1)).sum(1)
        weight = 2 - len(z0) * (cosines / sigma).softmax(0).detach()
    losses = negatives.logsumexp(1) - weight.repeat(2) * logits[positive]
    losses = torch.where((~(excluded | positive)).any(1), losses, 0.0)
    return reduce(losses.unflatten(0, (2, -1)).mean(0), weights, reduction)


def debiased_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.5,
    tau_plus: float = 0.1,
    beta: float = 0.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return NT-Xent with corrected, hardness-weighted negatives (Robinson et al., 2021, arXiv:2010.04592, equation 4).

    G = max((n sum e^{(1 + beta) S} / sum e^{beta S} - tau n e^T) / (1 - tau), n e^{-1/t}),    L = -log(e^T / (e^T + G))

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(debiased_loss(z, z, temperature=0.5, tau_plus=0.1, beta=1.0).item(), 9)
    0.145869949
    """
    logits, positive, itself = two_view_logits(z0, z1, temperature, None)
    negative, count = ~(positive | itself), 2 * len(z0) - 2
    if not count:
        return reduce(0 * logits.diagonal()[: len(z0)], weights, reduction)
    negative_terms, positive_terms = logits[negative].view(-1, count).exp(), logits[positive].exp()
    weighted = negative_terms.sum(1)
    if beta:
        weighted = count * negative_terms.pow(1 + beta).sum(1) / negative_terms.pow(beta).sum(1)
    smallest = count * torch.exp(-1 / torch.as_tensor(temperature, dtype=z0.dtype, device=z0.device))
    corrected = torch.maximum((weighted - tau_plus * count * positive_terms) / (1 - tau_plus), smallest)
    losses = -torch.log(positive_terms / (positive_terms + corrected))
    return reduce(losses.unflatten(0, (2, -1)).mean(0), weights, reduction)


def alignment_uniformity_loss(
    z0: Tensor, z1: Tensor, *, alpha: float = 2.0, t: float = 2.0, uniformity: float = 1.0
) -> Tensor:
    """Return the distance of views plus the log of each view's mean potential (Wang and Isola, 2020, arXiv:2005.10242).

    L = mean_i |x_i - y_i|^alpha + uniformity / 2 sum_views log mean_{i != j} exp(-t (2 - 2 x_i . x_j))

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> alignment_uniformity_loss(z, z).item()
    -4.0
    """
    x, y = normalized(z0), normalized(z1)
    loss = torch.linalg.vector_norm(x - y, dim=1).pow(alpha).mean()
    others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    for z in (x, y) if len(x) > 1 else ():
        loss = loss + uniformity / 2 * (2 * t * (z @ z.T - 1))[others].exp().mean().log()
    return loss
