"""Debiased contrastive loss: negatives are corrected for the positives among them, and hard ones weigh more.

    z    = rows of both views of all ranks, each divided by its norm
    S_ij = z_i . z_j / temperature,    n = 2B - 2 negatives of each row
    W_i  = n sum_j exp((1 + beta) S_ij) / sum_j exp(beta S_ij)          sum_j exp S_ij for beta = 0
    G_i  = max( (W_i - tau n exp S_{i p(i)}) / (1 - tau),  n exp(-1 / temperature) )
    L_i  = log(exp S_{i p(i)} + G_i) - S_{i p(i)}

The two sums over the negatives have different scales: two sweeps like NT-Xent's, or one if beta is 0. The rest is O(B).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_number
from ..contract import Checks, KernelOptions, Options, Reduction, agree, entry, reduce_losses
from ..logsumexp import softplus
from ._declaration import Declaration
from ._module import KernelLoss
from ._views import two_views, two_views_inputs

_ALL = 60.0  # a positive with exp(60) times W_i leaves nothing of the corrected sum, and exp(60) is finite


@entry
def debiased_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.5,
    tau_plus: float = 0.1,
    beta: float = 0.0,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[KernelOptions],
) -> Tensor:
    r"""Return NT-Xent with a sum over negatives that is corrected for false ones and weighted toward hard ones.

    G_i = max((W_i - tau n exp S_{i p(i)}) / (1 - tau), n exp(-1 / temperature)),    n = 2B - 2,
    L_i = -log(exp S_{i p(i)} / (exp S_{i p(i)} + G_i)),    W_i = n sum_j exp((1 + beta) S_ij) / sum_j exp(beta S_ij).

    Args:
        z0: (b_r, d), this rank's rows of the first view; they are normalized inside. b_r may differ between ranks and
            may be 0. float64, float32, bfloat16 or float16.
        z1: (b_r, d), the second view; row i is another view of row i of z0.
        temperature: divides the cosines; a positive number or a tensor of shape () or [1], which may be learned; the
            same on all ranks.
        tau_plus: tau, the probability that a negative is of the same class, 0 <= tau < 1.
        beta: concentration on hard negatives, >= 0; with 0 all weigh the same (the debiased loss).
        weights: (b_r,), one for each example, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": the mean over both views of each of this rank's examples, (b_r,);
            see :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`.

    Returns:
        L, the same on every rank: `wholebatch.reference.debiased_loss` of the whole batch, at least in float32.

    An example without negatives has loss 0. Collectives, work and memory: those of
    :func:`wholebatch.functional.nt_xent_loss`; twice those with beta.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.nt_xent_loss`;
            also for tau_plus or beta outside its range.
        RuntimeError: if the gradient is differentiated again.

    Source: Chuang et al., 2020, arXiv:2007.00224, equation 8; Robinson et al., 2021, arXiv:2010.04592, equation 4.

    >>> import torch, wholebatch as wb
    >>> z = torch.eye(3)
    >>> wb.functional.debiased_loss(z, z, temperature=0.5, tau_plus=0.1, beta=1.0)
    tensor(0.1459)
    """
    facts = agree(
        "debiased_loss",
        Options(reduction=reduction, **options),
        two_views_inputs(z0, z1, temperature=temperature, weights=weights),
        Checks(check=lambda: _check(tau_plus, beta), must_match=("tau_plus", "beta"), settings=(tau_plus, beta)),
    )
    facts = facts.widened() if beta else facts
    count = facts.rows["z0"].total
    negatives = 2 * count - 2
    side = two_views(facts, add_positive=False, sharper=1 + beta, narrow=beta > 0)
    assert side.target is not None
    target, weighted = side.target / (1 + beta), side.logsumexp
    if not negatives:
        return reduce_losses(facts, 0 * target.unflatten(0, (2, -1)).mean(0), count)
    if beta:
        weighted = (
            weighted - two_views(facts, add_positive=False, sharper=beta, narrow=True).logsumexp + math.log(negatives)
        )
    share = (target - weighted).clamp(max=_ALL).exp()  # exp S_{i p(i)} / W_i
    remaining = 1 - tau_plus * negatives * share
    tiny = torch.finfo(remaining.dtype).tiny
    corrected = weighted + remaining.clamp(min=tiny).log() - math.log(1 - tau_plus)
    floor = math.log(negatives) - 1 / facts.inputs["temperature"]
    losses = softplus(torch.maximum(corrected, floor + torch.zeros_like(corrected)) - target)
    return reduce_losses(facts, losses.unflatten(0, (2, -1)).mean(0), count)


def _check(tau_plus: float, beta: float) -> dict[str, float]:
    if not 0 <= check_number("tau_plus", tau_plus) < 1:
        raise ValueError(f"tau_plus must lie in [0, 1), got {tau_plus}; it is the share of false negatives")
    if check_number("beta", beta) < 0:
        raise ValueError(f"beta must not be negative, got {beta}; with 0 all negatives weigh the same")
    return {"tau_plus": tau_plus, "beta": beta}


class DebiasedLoss(KernelLoss, check=_check):
    """Debiased contrastive loss over the global batch: the settings of :func:`wholebatch.functional.debiased_loss`.

    Args:
        temperature: as in :class:`wholebatch.NTXentLoss`, also for a learned one.
    """

    temperature: Tensor | float = 0.5
    tau_plus: float = 0.1
    beta: float = 0.0

    @entry
    def forward(self, z0: Tensor, z1: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.debiased_loss`: (b_r, d), (b_r, d) -> L, the same on all ranks."""
        return debiased_loss(z0, z1, weights=weights, **self.settings)


DECLARATION = Declaration(debiased_loss, DebiasedLoss, scale="fixed")
