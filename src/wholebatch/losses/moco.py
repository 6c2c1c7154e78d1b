"""MoCo: each query's key against a queue of past keys.

    A_i = logsumexp_j scale q_i . n_j over the queue's keys n_j,    T_i = scale q_i . k_i
    L   = 1/B sum_i softplus(A_i - T_i)

Every rank holds the whole queue (see `key_queue`), as in MoCo, so the loss moves only its value between ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.precision import wide_dtype
from ..contract import Checks, Inputs, LossOptions, Options, Reduction, agree, entry, reduce_losses
from ..kernels import Kernel
from ..logsumexp import softplus
from ..nodes import Bounds, Layout, Operands, Towers, row_statistics, statistics_fields
from ..partition import Partition
from ..sweep import Memory, Pairs, Precision, Selection
from ._logit_scale import TakesLogitScale
from ._module import LossModule
from .statistics import report_statistics


class _Options(LossOptions, total=False):
    memory: Memory
    kernel: Kernel
    precision: Precision


@entry
def moco_loss(
    queries: Tensor,
    keys: Tensor,
    queue: Tensor,
    *,
    logit_scale: Tensor | float,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[_Options],
) -> Tensor:
    r"""Return the cross-entropy of each query's key among that key and those of a queue, with its exact gradient.

    L_i = log(exp T_i + sum_j exp(logit_scale q_i . n_j)) - T_i,    T_i = logit_scale q_i . k_i.

    Args:
        queries: Q_r, (b_r, d), this rank's rows as they are: the caller normalizes. b_r may differ between ranks and
            may be 0. float64, float32, bfloat16 or float16.
        keys: K_r, (b_r, d), of the momentum encoder; row i is the positive of query i, and counts for no other query.
        queue: (n, d), the past keys, the same on every rank: `KeyQueue.keys`.
        logit_scale: multiplies the similarities (1 / temperature); a number or a tensor of shape () or [1], the same
            on all ranks.
        weights: (b_r,), one for each query, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": L_i of this rank's queries; see :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`; there is no exchange. A queue that needs a gradient is
            a replicated parameter: under `sync="mean"` the average of the ranks' gradients is its gradient.

    Returns:
        L, the same on every rank: `wholebatch.reference.moco_loss` of the whole batch, at least in float32.

    Collectives: 1 handshake in each pass, and all-reduces of one number. Work: 3 units of b_r n d multiply-adds per
    rank, 2 where exp(S) is kept. Memory beyond inputs and gradients: two tiles and O(b_r).

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for a queue whose length differs between ranks.
        RuntimeError: if the gradient is differentiated again.

    Source: He et al., 2020, arXiv:1911.05722, equation 1 and algorithm 1.

    >>> import torch, wholebatch as wb
    >>> x = torch.eye(3)
    >>> wb.functional.moco_loss(x, x, -x, logit_scale=10.0)
    tensor(9.0798e-05)
    """
    facts = agree(
        "moco_loss",
        Options(exchange="gather", reduction=reduction, **options),
        Inputs(
            features={"queries": queries, "keys": keys, "queue": queue},
            scalars={"logit_scale": logit_scale},
            weights=(weights, "queries"),
            paired=("queries", "keys"),
            matching=("queries", "keys"),
            any_scale=True,
        ),
        Checks(
            check=lambda: {"length of the queue": len(queue)},
            must_match=("length of the queue",),
            settings=(),
        ),
    ).widened()
    rows, scale, inputs = facts.rows["queries"], facts.scalars["logit_scale"], facts.inputs
    side, _ = row_statistics(
        facts,
        (scale, inputs["logit_scale"]),
        Operands(
            [inputs["queries"], inputs["queue"]],
            Towers(stays=(0,), travels=(1,)),
            Layout(rows, Partition((len(queue),)), replicated=True),
            narrow=True,
        ),
        Selection(Pairs()),
        Bounds(facts.norms["queries"] * facts.norms["queue"], min_pair_product=facts.min_pair_product),
        rows=statistics_fields(target=False, statistics=facts.statistics),
    )
    assert side is not None
    similarities = torch.linalg.vecdot(inputs["queries"], inputs["keys"])
    target = inputs["logit_scale"] * similarities.to(wide_dtype(facts.device))
    if facts.statistics:
        report_statistics(facts.comm, facts.factor_of("logit_scale"), [(side, target)])
    return reduce_losses(facts, softplus(side.logsumexp - target), rows.total)


class MoCoLoss(TakesLogitScale, LossModule):
    """MoCo over the global batch: the settings of :func:`wholebatch.functional.moco_loss`.

    Args:
        logit_scale: default for calls that leave it out, as in :class:`wholebatch.CLIPLoss`.
    """

    reduction: Reduction = "mean"
    memory: Memory = "auto"
    kernel: Kernel = "auto"
    precision: Precision = "auto"

    @entry
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        queue: Tensor,
        *,
        logit_scale: Tensor | float | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.moco_loss`: (b_r, d), (b_r, d), (n, d), a scalar -> L."""
        return moco_loss(queries, keys, queue, weights=weights, **self._settings_of_call(logit_scale=logit_scale))
