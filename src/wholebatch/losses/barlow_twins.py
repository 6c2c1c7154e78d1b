"""Barlow Twins: the distance from the identity of the correlations between the features of two views.

    C_kl = 1/B sum_i z0_ik z1_il          rows of all ranks, each feature minus its mean, divided by its deviation
    L    = sum_k (1 - C_kk)^2 + redundancy sum_{k != l} C_kl^2

Means, variances and C are d and d x d sums over all ranks. Nothing of size B x B is made.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_positive_number, check_weight
from ..contract import Checks, LossOptions, Options, agree, entry
from ._declaration import Declaration
from ._module import LossModule
from ._moments import centered, cross_product, shared_loss, sum_of_squares
from ._views import two_view_features


@entry
def barlow_twins_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    redundancy: float = 5e-3,
    epsilon: float = 1e-5,
    **options: Unpack[LossOptions],
) -> Tensor:
    r"""Return the distance from the identity of the correlation matrix of two views, over the rows of all ranks.

    L = sum_k (1 - C_kk)^2 + redundancy sum_{k != l} C_kl^2,    C = Z0^T Z1 / B of standardized features.

    Args:
        z0: (b_r, d), this rank's rows of the first view, as they are. b_r may differ between ranks and may be 0.
            float64, float32, bfloat16 or float16 (the last two are widened to float32).
        z1: (b_r, d), the second view; row i is another view of row i of z0.
        redundancy: weight of the correlations between different features, lambda in the paper.
        epsilon: added to the (biased) variances, > 0.
        **options: see :class:`wholebatch.options.LossOptions`.

    Returns:
        L, the same on every rank: `wholebatch.reference.barlow_twins_loss` of the whole batch, at least in float32.

    Collectives: forward 1 handshake and 5 all-reduces, of d and d^2 numbers; backward the same. Work: O(b_r d^2).
    Memory: O(b_r d + d^2), not flat in d.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for fewer than two rows in all, and for options out of range.
        RuntimeError: on several ranks, if the gradient is differentiated again.

    Source: Zbontar et al., 2021, arXiv:2103.03230, equations 1 and 2.

    >>> import torch, wholebatch as wb
    >>> z = torch.eye(3)
    >>> wb.functional.barlow_twins_loss(z, z)
    tensor(0.0075)
    """
    facts = agree(
        "barlow_twins_loss",
        Options(**options),
        two_view_features(z0, z1),
        Checks.of(_check, redundancy=redundancy, epsilon=epsilon),
    )
    comm, count = facts.comm, facts.rows["z0"].total
    if count < 2:
        raise ValueError("barlow_twins_loss: a variance needs at least two rows in the global batch, got 1")
    rows = []
    for name in ("z0", "z1"):
        x = centered(facts, name)
        rows.append(x / (sum_of_squares(comm, x) / count + epsilon).sqrt())
    correlation = cross_product(comm, *rows) / count
    on_diagonal = correlation.diagonal()
    off_diagonal = correlation.square().sum() - on_diagonal.square().sum()
    return shared_loss(facts, (1 - on_diagonal).square().sum() + redundancy * off_diagonal)


def _check(redundancy: float, epsilon: float) -> None:
    check_weight("redundancy", redundancy, "it is the weight of the entries off the diagonal; 0 leaves them out")
    check_positive_number("epsilon", epsilon, "it is added to variances")


class BarlowTwinsLoss(LossModule, check=_check):
    """Barlow Twins over the global batch: the settings of :func:`wholebatch.functional.barlow_twins_loss`."""

    redundancy: float = 5e-3
    epsilon: float = 1e-5

    @entry
    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        """See :func:`wholebatch.functional.barlow_twins_loss`: (b_r, d), (b_r, d) -> L, the same on all ranks."""
        return barlow_twins_loss(z0, z1, **self.settings)


DECLARATION = Declaration(barlow_twins_loss, BarlowTwinsLoss, moments=True)
