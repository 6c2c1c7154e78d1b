"""Decoupled contrastive loss: SimCLR's, without the positive in its own softmax.

    z    = rows of both views of all ranks, each divided by its norm
    S_ij = z_i . z_j / temperature
    L_i  = logsumexp over the negatives of S_ij - w_i S_{i p(i)}          negatives: all but i and its view p(i)

Work and memory are NT-Xent's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_number, check_temperature
from ..comm.inside import all_reduce
from ..contract import Checks, KernelOptions, Options, Reduction, agree, entry, reduce_losses
from ._declaration import Declaration
from ._module import KernelLoss
from ._views import two_views, two_views_inputs
from .statistics import report_statistics


@entry
def dcl_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    sigma: float | None = None,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[KernelOptions],
) -> Tensor:
    r"""Return the logsumexp over each row's negatives minus its positive's logit, over the two views of all ranks.

    S = Z Z^T / temperature,    L_i = logsumexp_{j != i, p(i)} S_ij - w_i S_{i p(i)},    Z = normalize([Z0; Z1]).

    Args:
        z0: (b_r, d), this rank's rows of the first view; they are normalized inside. b_r may differ between ranks and
            may be 0. float64, float32, bfloat16 or float16.
        z1: (b_r, d), the second view; row i is another view of row i of z0.
        temperature: divides the cosines; a positive number or a tensor of shape () or [1], which may be learned; the
            same on all ranks.
        sigma: positives have the weight w_i = 2 - B softmax_i(cos_i / sigma) over all B examples, which is smaller
            for pairs that are already similar (DCLW); it carries no gradient. None: w_i = 1.
        ids: (b_r,) integers; examples with equal ids are not negatives of each other.
        weights: (b_r,), one for each example, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": the mean over both views of each of this rank's examples, (b_r,);
            see :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`.

    Returns:
        L, the same on every rank: `wholebatch.reference.dcl_loss` of the whole batch, at least in float32.

    An example without negatives has loss 0. Collectives, work and memory: those of
    :func:`wholebatch.functional.nt_xent_loss`; with sigma two more all-reduces of a number.
    :func:`wholebatch.with_statistics` gives statistics over all rows of Z.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.nt_xent_loss`;
            also for a sigma that is not positive.
        RuntimeError: if the gradient is differentiated again.

    Source: Yeh et al., 2021, arXiv:2110.06848, equation 6; section 3.3 for the weights.

    >>> import torch, wholebatch as wb
    >>> z = torch.eye(3)
    >>> wb.functional.dcl_loss(z, z, temperature=0.5)
    tensor(-0.6137)
    """
    facts = agree(
        "dcl_loss",
        Options(reduction=reduction, **options),
        two_views_inputs(z0, z1, temperature=temperature, ids=ids, weights=weights),
        Checks(check=lambda: _check(sigma), must_match=("sigma",), settings=(sigma,)),
    )
    count = facts.rows["z0"].total
    side = two_views(facts, add_positive=False)
    assert side.target is not None
    target = side.target
    if sigma is not None:
        cosines = target.detach().unflatten(0, (2, -1))[0] * facts.factor_of("temperature")
        nothing = cosines.new_full((1,), -torch.inf)
        largest = all_reduce(facts.comm, torch.cat([cosines, nothing]).amax(), "max")
        similar = ((cosines - largest) / sigma).exp()
        target = target * (2 - count * similar / all_reduce(facts.comm, similar.sum())).repeat(2)
    losses = torch.where(side.logsumexp.isneginf(), 0.0, side.logsumexp - target)
    if facts.statistics:
        report_statistics(facts.comm, 1 / facts.factor_of("temperature"), [(side, side.target)])
    return reduce_losses(facts, losses.unflatten(0, (2, -1)).mean(0), count)


def _check(sigma: float | None) -> dict[str, float | None]:
    return {"sigma": None if sigma is None else check_temperature("sigma", check_number("sigma", sigma))}


class DCLLoss(KernelLoss, check=_check):
    """Decoupled contrastive loss over the global batch: the settings of :func:`wholebatch.functional.dcl_loss`.

    Args:
        temperature: as in :class:`wholebatch.NTXentLoss`, also for a learned one.
    """

    temperature: Tensor | float = 0.1
    sigma: float | None = None

    @entry
    def forward(self, z0: Tensor, z1: Tensor, *, ids: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.dcl_loss`: (b_r, d), (b_r, d) -> L, the same on all ranks."""
        return dcl_loss(z0, z1, ids=ids, weights=weights, **self.settings)


DECLARATION = Declaration(dcl_loss, DCLLoss, scale="fixed")
