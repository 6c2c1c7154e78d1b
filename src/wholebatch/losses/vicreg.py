"""VICReg: views should be near each other, features should vary, and no two features should correlate.

    L = invariance 1/(B d) sum_i |z0_i - z1_i|^2
      + variance   1/2 sum over views of 1/d sum_k [1 - sqrt(Var_k + epsilon)]_+
      + covariance     sum over views of 1/d sum_{k != l} Cov_kl^2

over the rows of all ranks. Means and covariances are d and d x d sums over all ranks. Nothing of size B x B is made.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_positive_number, check_weight
from ..contract import Checks, LossOptions, Options, agree, entry
from ..sync import shared_sum
from ._declaration import Declaration
from ._module import LossModule
from ._moments import centered, cross_product, shared_loss
from ._views import two_view_features


@entry
def vicreg_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    epsilon: float = 1e-4,
    **options: Unpack[LossOptions],
) -> Tensor:
    r"""Return the distance of two views plus a hinge on deviations and squared covariances, over the rows of all ranks.

    L = invariance mean |Z0 - Z1|^2 + variance / 2 sum_views mean_k [1 - sqrt(Var_k + epsilon)]_+
        + covariance sum_views sum_{k != l} Cov_kl^2 / d,    Var and Cov with B - 1.

    Args:
        z0: (b_r, d), this rank's rows of the first view, as they are. b_r may differ between ranks and may be 0.
            float64, float32, bfloat16 or float16 (the last two are widened to float32).
        z1: (b_r, d), the second view; row i is another view of row i of z0.
        invariance: weight of the distance of the views, >= 0.
        variance: weight of the hinge, >= 0.
        covariance: weight of the covariances, >= 0.
        epsilon: added to the variances, > 0.
        **options: see :class:`wholebatch.options.LossOptions`.

    Returns:
        L, the same on every rank: `wholebatch.reference.vicreg_loss` of the whole batch, at least in float32.

    Collectives: forward 1 handshake and 5 all-reduces, of d, d^2 and 1 numbers; backward the same. Work: O(b_r d^2).
    Memory: O(b_r d + d^2), not flat in d.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for fewer than two rows in all, and for options out of range.
        RuntimeError: on several ranks, if the gradient is differentiated again.

    Source: Bardes et al., 2022, arXiv:2105.04906, equations 1 to 6.

    >>> import torch, wholebatch as wb
    >>> z = torch.eye(3)
    >>> wb.functional.vicreg_loss(z, 2 * z)
    tensor(14.5598)
    """
    facts = agree(
        "vicreg_loss",
        Options(**options),
        two_view_features(z0, z1),
        Checks.of(_check, invariance=invariance, variance=variance, covariance=covariance, epsilon=epsilon),
    ).widened()
    comm, count = facts.comm, facts.rows["z0"].total
    if count < 2:
        raise ValueError("vicreg_loss: a variance needs at least two rows in the global batch, got 1")
    difference = (facts.inputs["z0"] - facts.inputs["z1"]).square().sum()
    d = facts.embedding_size
    loss = invariance * shared_sum(comm, difference) / (count * d)
    for name in ("z0", "z1"):
        x = centered(facts, name)
        cov = cross_product(comm, x, x) / (count - 1)
        deviations = (cov.diagonal() + epsilon).sqrt()
        loss = loss + variance / 2 * torch.relu(1 - deviations).mean()
        loss = loss + covariance * (cov.square().sum() - cov.diagonal().square().sum()) / d
    return shared_loss(facts, loss)


def _check(invariance: float, variance: float, covariance: float, epsilon: float) -> None:
    for name, value in (("invariance", invariance), ("variance", variance), ("covariance", covariance)):
        check_weight(name, value, "it is the weight of a term of the loss; 0 leaves the term out")
    check_positive_number("epsilon", epsilon, "it is added to variances")


class VICRegLoss(LossModule, check=_check):
    """VICReg over the global batch: the settings of :func:`wholebatch.functional.vicreg_loss`."""

    invariance: float = 25.0
    variance: float = 25.0
    covariance: float = 1.0
    epsilon: float = 1e-4

    @entry
    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        """See :func:`wholebatch.functional.vicreg_loss`: (b_r, d), (b_r, d) -> L, the same on all ranks."""
        return vicreg_loss(z0, z1, **self.settings)


DECLARATION = Declaration(vicreg_loss, VICRegLoss, moments=True)
