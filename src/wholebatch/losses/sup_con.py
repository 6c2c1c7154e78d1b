"""Supervised contrastive loss: all rows of the same class are positives of each other.

    z    = rows of all ranks, each divided by its norm
    S_ij = z_i . z_j / temperature
    L_i  = logsumexp_{j != i} S_ij - 1/|P(i)| sum_{p in P(i)} S_ip          P(i): the others with i's label

S is symmetric: the tiles above its diagonal suffice, and the work is half of a full sweep's.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ..contract import Checks, KernelOptions, Options, Reduction, entry
from ..nodes import statistics_fields
from ..nodes.cross_entropy import many_positives
from ._declaration import Declaration, Sweep
from ._labeled import agree_labeled
from ._module import KernelLoss
from .statistics import report_statistics


@entry
def sup_con_loss(
    features: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    ignore_index: int | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[KernelOptions],
) -> Tensor:
    r"""Return the mean cross-entropy of each row's positives, the others of its class, among the rows of all ranks.

    S = Z Z^T / temperature,    L_i = logsumexp_{j != i} S_ij - mean_{p in P(i)} S_ip,    Z = normalize(all rows).

    L is the mean over the rows that have a positive, and 0 if there is no such row. Rows without a positive are
    negatives of other rows, but no anchors.

    Args:
        features: Z_r, (b_r, d), this rank's rows, or (b_r, v, d) for v views of each example; they are normalized
            inside. b_r may differ between ranks and may be 0. float64, float32, bfloat16 or float16.
        labels: (b_r,) integers >= 0, the class of each example.
        ignore_index: a label whose rows are left out, as if they were not in the batch: they are no row of the mean, no
            positive and no negative. Which these are is read on the host.
        temperature: divides the cosines; a positive number or a tensor of shape () or [1], which may be learned; the
            same on all ranks.
        weights: (b_r,), one for each example, or (b_r, v), >= 0; the mean is sum w_i L_i / sum w_i over anchors.
        reduction: "mean", "sum", or "none": L_i of this rank's rows, (b_r,) or (b_r, v), 0 without a positive; see
            :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`.

    Returns:
        L, the same on every rank: `wholebatch.reference.sup_con_loss` of the whole batch, at least in float32.

    Collectives: those of :func:`wholebatch.functional.nt_xent_loss`, and one all-gather of labels. Work: 2 units of
    b_r B d multiply-adds per rank. Memory: that of :func:`wholebatch.functional.nt_xent_loss`. Time and memory for
    positives grow with their number within a tile.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for labels that are negative, no integers or not one for each example, and for a temperature that is
            not positive.
        RuntimeError: if the gradient is differentiated again.

    Source: Khosla et al., 2020, arXiv:2004.11362, equation 2 (L_out), without its factor
    temperature / base_temperature.

    >>> import torch, wholebatch as wb
    >>> wb.functional.sup_con_loss(torch.eye(3), torch.tensor([0, 0, 1]), temperature=0.5)
    tensor(0.6931)
    """
    data = agree_labeled(
        "sup_con_loss",
        Options(reduction=reduction, **options),
        (features, labels, weights, ignore_index),
        Checks(settings=()),
        scalars={"temperature": temperature},
    )
    facts = data.facts
    scale, scale_input = 1 / facts.scalars["temperature"], 1 / facts.inputs["temperature"]
    side = data.statistics((scale, scale_input), "all", statistics_fields(statistics=facts.statistics))
    losses = many_positives(side, data.positives)
    if facts.statistics:
        assert side.target is not None
        report_statistics(facts.comm, facts.factor(scale, scale_input), [(side, side.target / data.positives)])
    return data.reduce(losses, data.anchors, data.positives > 0)


class SupConLoss(KernelLoss):
    """Supervised contrastive loss over the global batch: the settings of :func:`wholebatch.functional.sup_con_loss`.

    Args:
        temperature: as in :class:`wholebatch.NTXentLoss`, also for a learned one.
    """

    temperature: Tensor | float = 0.1
    ignore_index: int | None = None

    @entry
    def forward(self, features: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.sup_con_loss`: (b_r, d), (b_r,) -> L, the same on all ranks."""
        return sup_con_loss(features, labels, weights=weights, **self.settings)


DECLARATION = Declaration(sup_con_loss, SupConLoss, Sweep())
