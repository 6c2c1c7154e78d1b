"""Supervised contrastive loss: all rows of the same class are positives of each other.

    z    = rows of all ranks, each divided by its norm
    S_ij = z_i . z_j / temperature
    L_i  = logsumexp_{j != i} S_ij - 1/|P(i)| sum_{p in P(i)} S_ip          P(i): the others with i's label

S is symmetric: the tiles above its diagonal say all, and the work is half of a full sweep's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._checks import check_flag, check_temperature
from ..comm import Group
from ..exchange import ExchangeName
from ..kernels import Kernel
from ..sweep import Memory
from ..sync import Sync
from ._cross_entropy import many_positives
from ._door import LossModule, Options, Reduction, eager
from ._labeled import agree_labeled
from ._softmax import wanted
from .statistics import batch_statistics


@eager
def sup_con_loss(
    features: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    weights: Tensor | None = None,
    return_statistics: bool = False,
    reduction: Reduction = "mean",
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    kernel: Kernel = "auto",
) -> Any:
    r"""Mean cross-entropy of each row's positives, the others of its class, among all other rows of all ranks.

    S = Z Z^T / temperature,    L_i = logsumexp_{j != i} S_ij - mean_{p in P(i)} S_ip,    Z = normalize(all rows).

    L is the mean over the rows that have a positive; the others are negatives of other rows, but no anchors. Where no
    row has one, L is 0.

    Args:
        features: Z_r, (b_r, d), this rank's rows, or (b_r, v, d) for v views of each example; they are normalized
            inside. b_r may differ between ranks and may be 0. float64, float32, bfloat16 or float16.
        labels: (b_r,) integers, the examples' classes.
        temperature: divides the cosines; a positive number or a tensor of shape () or [1], which may be learned; the
            same on all ranks.
        weights: (b_r,), of the examples, or (b_r, v), >= 0; the mean is sum w_i L_i / sum w_i over anchors.
        return_statistics: return (L, :class:`wholebatch.BatchStatistics`).
        reduction: "mean", "sum", or "none": L_i of this rank\'s rows, (b_r,) or
            (b_r, v), 0 where there is no positive; see :func:`wholebatch.functional.clip_loss`.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: "gather", "ring" or "auto", as there.
        memory: "flat", "auto" or bytes, as there.
        kernel: as in :func:`wholebatch.functional.clip_loss`.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.sup_con_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L, with the meaning of `sync` as in :func:`wholebatch.functional.clip_loss`.
    `backward` is called on every rank, with the same incoming gradient and in the same order as that of other losses;
    ranks that differ all raise ValueError.

    Work: 2 units of b_r B d multiply-adds per rank. Memory and collectives: as
    :func:`wholebatch.functional.nt_xent_loss`, and one all-gather of labels. Time and memory for positives grow with
    their number within a tile.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also labels that are no integers or not one for each example, and a temperature that is not positive.
        RuntimeError: if the gradient is differentiated again.

    Source: Khosla et al., 2020, arXiv:2004.11362, equation 2 (L_out); its factor temperature / base_temperature is
    left to the caller.

    >>> import torch, wholebatch as wb
    >>> wb.functional.sup_con_loss(torch.eye(3), torch.tensor([0, 0, 1]), temperature=0.5)
    tensor(0.6931)
    """
    data = agree_labeled(
        "sup_con_loss",
        Options(group, sync, exchange, memory, reduction, kernel),
        features,
        labels,
        weights,
        scalars={"temperature": temperature},
        positive=("temperature",),
        check=lambda: {"statistics": check_flag("return_statistics", return_statistics)},
        must_match=("statistics",),
    )
    agreed = data.agreed
    scale = 1 / agreed.scalars["temperature"]
    side = data.numbers((scale, 1 / agreed.inputs["temperature"]), "all", wanted(statistics=return_statistics))
    losses = many_positives(side, data.positives)
    loss = data.reduce(losses, data.anchors, data.positives > 0)
    if not return_statistics:
        return loss
    assert side.target is not None
    return loss, batch_statistics(agreed.comm, scale, [(side, side.target / data.positives)])


class SupConLoss(LossModule):
    """Supervised contrastive loss over the global batch.

    Args:
        temperature, return_statistics, reduction, group, sync, exchange, memory, kernel: as in
            :func:`wholebatch.functional.sup_con_loss`.
    """

    def __init__(
        self,
        *,
        temperature: Tensor | float = 0.1,
        return_statistics: bool = False,
        reduction: Reduction = "mean",
        group: Group = None,
        sync: Sync = "mean",
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
        kernel: Kernel = "auto",
    ) -> None:
        super().__init__(
            temperature=temperature,
            return_statistics=return_statistics,
            reduction=reduction,
            group=group,
            sync=sync,
            exchange=exchange,
            memory=memory,
            kernel=kernel,
        )
        check_temperature("temperature", temperature)

    @eager
    def forward(self, features: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Any:
        """See :func:`wholebatch.functional.sup_con_loss`: (b_r, d), (b_r,) -> L, the same on all ranks."""
        return sup_con_loss(features, labels, weights=weights, **self.settings)
