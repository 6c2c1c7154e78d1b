"""Losses of two views that compare the means and covariances of features, and no pairs of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._shared import check_shapes, normalized


def barlow_twins_loss(z0: Tensor, z1: Tensor, *, redundancy: float = 5e-3, epsilon: float = 1e-5) -> Tensor:
    """Return the correlations' distance from the identity (Zbontar et al., 2021, arXiv:2103.03230, equations 1 and 2).

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(barlow_twins_loss(z, z).item(), 9)
    0.007499331
    """
    check_shapes("barlow_twins_loss", {"z0": z0, "z1": z1})
    n0, n1 = ((z - z.mean(0)) / (z.var(0, correction=0) + epsilon).sqrt() for z in (z0, z1))
    c = n0.T @ n1 / len(z0)
    return (1 - c.diagonal()).square().sum() + redundancy * (c.square().sum() - c.diagonal().square().sum())


def vicreg_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    epsilon: float = 1e-4,
) -> Tensor:
    """Return a distance of views, a hinge and covariances (Bardes et al., 2022, arXiv:2105.04906, equations 1 to 6).

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(vicreg_loss(z, 2 * z).item(), 9)
    14.559816962
    """
    check_shapes("vicreg_loss", {"z0": z0, "z1": z1})
    loss = invariance * F.mse_loss(z0, z1)
    for z in (z0, z1):
        cov = torch.atleast_2d(z.T.cov())
        loss = loss + variance / 2 * F.relu(1 - (cov.diagonal() + epsilon).sqrt()).mean()
        loss = loss + covariance * (cov.square().sum() - cov.diagonal().square().sum()) / z.shape[1]
    return loss


def w_mse_loss(z0: Tensor, z1: Tensor, *, epsilon: float = 0.0) -> Tensor:
    """Return the distance of whitened views (Ermolov et al., 2021, arXiv:2007.06346, equations 1, 4 and 5).

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(w_mse_loss(z, z, epsilon=0.5).item(), 9)
    0.0
    """
    check_shapes("w_mse_loss", {"z0": z0, "z1": z1})
    whitened = []
    for z in (z0, z1):
        cov = (1 - epsilon) * z.T.cov() + epsilon * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        whitened.append(normalized((z - z.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(cov)).T))
    return (whitened[0] - whitened[1]).square().sum(1).mean()
