"""W-MSE: the distance of two views whose features are whitened over the batch.

    w = (z - mean) F^-T,    F F^T = (1 - epsilon) Cov + epsilon 1          of each view, over the rows of all ranks
    L = 1/B sum_i |w0_i / |w0_i| - w1_i / |w1_i||^2

The means and the d x d covariances are sums over all ranks; every rank factorizes them and whitens its local rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_number
from .._base.normalize import normalize_rows
from ..contract import Checks, LossOptions, Options, agree, entry, finish
from ..sync import total
from ._declaration import Declaration
from ._module import LossModule
from ._moments import centered, cross_product
from ._views import two_view_features


@entry
def w_mse_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    epsilon: float = 0.0,
    **options: Unpack[LossOptions],
) -> Tensor:
    r"""Return the mean squared distance of two views' whitened, normalized rows, over the rows of all ranks.

    L = mean_i |n(w0_i) - n(w1_i)|^2,    n(w) = w / |w|,
    W = (Z - mean) F^-T,    F F^T = (1 - epsilon) Cov + epsilon 1.

    Args:
        z0: (b_r, d), this rank's rows of the first view, as they are. b_r may differ between ranks and may be 0.
            float64, float32, bfloat16 or float16 (the last two are widened to float32).
        z1: (b_r, d), the second view; row i is another view of row i of z0.
        epsilon: share of the identity in the covariance, 0 <= epsilon <= 1; use more than 0 if there are not many more
            rows than features.
        **options: see :class:`wholebatch.options.LossOptions`.

    Returns:
        L, the same on every rank: `wholebatch.reference.w_mse_loss` of the whole batch, at least in float32.

    The paper whitens random parts of the batch; this loss whitens the whole batch. Collectives: forward 1 handshake and
    5 all-reduces, of d, d^2 and 1 numbers; backward 1 handshake and 4. Work: O(b_r d^2 + d^3). Memory:
    O(b_r d + d^2), not flat in d.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for fewer than two rows in all, and for options out of range.
        RuntimeError: on several ranks, if the gradient is differentiated again.

    Source: Ermolov et al., 2021, arXiv:2007.06346, equations 1, 4 and 5.

    >>> import torch, wholebatch as wb
    >>> z = torch.eye(3)
    >>> wb.functional.w_mse_loss(z, z, epsilon=0.5)
    tensor(0.)
    """
    facts = agree(
        "w_mse_loss",
        Options(**options),
        two_view_features(z0, z1),
        Checks(check=lambda: _check(epsilon), must_match=("epsilon",), settings=(epsilon,)),
    )
    comm, count = facts.comm, facts.rows["z0"].total
    if count < 2:
        raise ValueError("w_mse_loss: a variance needs at least two rows in the global batch, got 1")
    d = facts.embedding_size
    if count <= d and not epsilon:
        raise ValueError(
            f"w_mse_loss: {count} rows have no invertible covariance of {d} features: it takes more rows than "
            "features; pass more rows, or an epsilon above 0"
        )
    whitened = []
    for name in ("z0", "z1"):
        x = centered(facts, name)
        cov = (1 - epsilon) * cross_product(comm, x, x) / (count - 1)
        factor, failed = torch.linalg.cholesky_ex(cov + epsilon * torch.eye(d, dtype=x.dtype, device=x.device))
        if facts.deferred is not None:
            facts.deferred.require(failed == 0)
        elif failed:
            raise ValueError(
                f"w_mse_loss: the covariance of {name} over {count} rows has no inverse: one of its {d} "
                "features is constant, or a combination of others; leave it out, or pass an epsilon above 0"
            )
        rows = torch.linalg.solve_triangular(factor, x.T, upper=False).T
        whitened.append(normalize_rows(rows))
    distance = (whitened[0] - whitened[1]).square().sum()
    return finish(facts, total(comm, distance) / count)


def _check(epsilon: float) -> dict[str, object]:
    if not 0 <= check_number("epsilon", epsilon) <= 1:
        raise ValueError(f"epsilon must lie in [0, 1], got {epsilon}; it is the identity's share of the covariance")
    return {"epsilon": epsilon}


class WMSELoss(LossModule, check=_check):
    """W-MSE over the global batch: the settings of :func:`wholebatch.functional.w_mse_loss`."""

    epsilon: float = 0.0

    @entry
    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        """See :func:`wholebatch.functional.w_mse_loss`: (b_r, d), (b_r, d) -> L, the same on all ranks."""
        return w_mse_loss(z0, z1, **self.settings)


DECLARATION = Declaration(w_mse_loss, WMSELoss, moments=True)
