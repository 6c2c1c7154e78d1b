"""Debiased contrastive loss: negatives corrected for the positives among them, and hard ones weighed up.

    z    = rows of both views of all ranks, each divided by its norm
    S_ij = z_i . z_j / temperature,    n = 2B - 2 negatives of each row
    W_i  = n sum_j exp((1 + beta) S_ij) / sum_j exp(beta S_ij)          weighted by exp(beta S_ij); sum_j exp S_ij for 0
    G_i  = max( (W_i - tau n exp S_{i p(i)}) / (1 - tau),  n exp(-1 / temperature) )
    L_i  = log(exp S_{i p(i)} + G_i) - S_{i p(i)}

Two sums over the negatives, at different scales: two sweeps of NT-Xent's, one where beta is 0. The rest is O(B).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._checks import check_number
from ..comm import Group
from ..contract import Checks, Options, Reduction, agree, entry, reduce_losses
from ..exchange import ExchangeName
from ..kernels import Kernel
from ..nodes.cross_entropy import softplus
from ..sweep import Memory
from ..sync import Sync
from ._module import KernelLoss
from ._views import two_views, two_views_inputs

_ALL = 60.0  # exp of that is more than any W_i leaves


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
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    kernel: Kernel = "auto",
) -> Tensor:
    r"""NT-Xent whose sum over negatives is corrected for false ones, and weighed toward hard ones.

    G_i = max((W_i - tau n exp S_{i p(i)}) / (1 - tau), n exp(-1 / temperature)),    n = 2B - 2,
    L_i = -log(exp S_{i p(i)} / (exp S_{i p(i)} + G_i)),    W_i = n sum_j exp((1 + beta) S_ij) / sum_j exp(beta S_ij).

    Args:
        z0: (b_r, d), this rank's rows of the first view; they are normalized inside. b_r may differ between ranks and
            may be 0. float64, float32, bfloat16 or float16.
        z1: (b_r, d), the second view; row i is another view of row i of z0.
        temperature: divides the cosines; a positive number or a tensor of shape () or [1], which may be learned; the
            same on all ranks.
        tau_plus: tau, the probability that a negative is of the same class, 0 <= tau < 1.
        beta: concentration on hard negatives, >= 0; 0 weighs all alike (the debiased loss).
        weights: (b_r,), of the examples, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": of this rank's examples the mean over both views, (b_r,); see
            :func:`wholebatch.functional.clip_loss`.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: "gather", "ring" or "auto", as there.
        memory: "flat", "auto" or bytes, as there.
        kernel: who computes a tile, as there.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.debiased_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L, with the meaning of `sync` as in :func:`wholebatch.functional.clip_loss`.
    `backward` is called on every rank, with the same incoming gradient and in the same order as that of other losses;
    ranks that differ all raise ValueError.

    An example without negatives has loss 0. Work, memory and collectives: as
    :func:`wholebatch.functional.nt_xent_loss`; twice that with beta.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.nt_xent_loss`;
            also tau_plus or beta outside of their range.
        RuntimeError: if the gradient is differentiated again.

    Source: Chuang et al., 2020, arXiv:2007.00224, equation 8; Robinson et al., 2021, arXiv:2010.04592, equation 4.

    >>> import torch, wholebatch as wb
    >>> z = torch.eye(3)
    >>> wb.functional.debiased_loss(z, z, temperature=0.5, tau_plus=0.1, beta=1.0)
    tensor(0.1459)
    """
    facts = agree(
        "debiased_loss",
        Options(group, sync, exchange, memory, reduction, kernel),
        two_views_inputs(z0, z1, temperature=temperature, weights=weights),
        Checks(check=lambda: _check(tau_plus, beta), must_match=("tau_plus", "beta")),
    )
    facts = facts.widened() if beta else facts
    count = facts.rows["z0"].total
    negatives = 2 * count - 2
    numbers = two_views(facts, add_positive=False, sharper=1 + beta, narrow=beta > 0)
    assert numbers.target is not None
    target, weighted = numbers.target / (1 + beta), numbers.logsumexp
    if not negatives:
        return reduce_losses(facts, 0 * target.unflatten(0, (2, -1)).mean(0), count)
    if beta:
        weighted = (
            weighted - two_views(facts, add_positive=False, sharper=beta, narrow=True).logsumexp + math.log(negatives)
        )
    share = (target - weighted).clamp(max=_ALL).exp()  # of the positive in W_i
    left = 1 - tau_plus * negatives * share
    tiny = torch.finfo(left.dtype).tiny
    corrected = weighted + left.clamp(min=tiny).log() - math.log(1 - tau_plus)
    floor = math.log(negatives) - 1 / facts.inputs["temperature"]
    losses = softplus(torch.maximum(corrected, floor + torch.zeros_like(corrected)) - target)
    return reduce_losses(facts, losses.unflatten(0, (2, -1)).mean(0), count)


def _check(tau_plus: float, beta: float) -> dict[str, float]:
    if not 0 <= check_number("tau_plus", tau_plus) < 1:
        raise ValueError(f"tau_plus must lie in [0, 1), got {tau_plus}; it is the share of false negatives")
    if check_number("beta", beta) < 0:
        raise ValueError(f"beta must not be negative, got {beta}; 0 weighs all negatives alike")
    return {"tau_plus": tau_plus, "beta": beta}


class DebiasedLoss(KernelLoss):
    """Debiased and hardness-weighted contrastive loss over the global batch.

    Args:
        temperature, tau_plus, beta, reduction, group, sync, exchange, memory, kernel: as in
            :func:`wholebatch.functional.debiased_loss`.
    """

    temperature: Tensor | float = 0.5
    tau_plus: float = 0.1
    beta: float = 0.0

    def check(self) -> None:
        """Raise ValueError unless the settings are valid."""
        super().check()
        _check(self.tau_plus, self.beta)

    @entry
    def forward(self, z0: Tensor, z1: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.debiased_loss`: (b_r, d), (b_r, d) -> L, the same on all ranks."""
        return debiased_loss(z0, z1, weights=weights, **self.settings)
