"""InfoNCE: each query against all keys of the global batch, one direction, with explicit negatives.

    S_ij = scale q_i . k_j          i: the queries of all ranks          j: their keys, and all ranks' negatives
    L    = 1/B sum_i [ logsumexp_j S_ij - S_ii ]

The larger tower stays on its rank, the smaller one travels. If the keys travel, a query's sum is whole on the query's
rank (rows of S). If there are more keys than queries, the queries travel and S is transposed: a query's sum is then
that of a column, and the exchange adds it up.
"""

from __future__ import annotations

from torch import Tensor

from ..comm import Group
from ..exchange import ExchangeName
from ..partition import Diagonal, Partition
from ..sweep import Memory, Pairs
from ..sync import Sync
from ._door import LossModule, Options, agree, eager
from ._softmax import SoftmaxPlan, softmax_loss
from ._towers import Towers


@eager
def info_nce_loss(
    queries: Tensor,
    keys: Tensor,
    *,
    logit_scale: Tensor | float,
    negatives: Tensor | None = None,
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
) -> Tensor:
    r"""Cross-entropy of each query's own key among the keys and negatives of all ranks, with its exact gradient.

    S = logit_scale * Q [K; N]^T,    L = CE(S, i),    Q, K, N: all ranks' rows.

    Args:
        queries: Q_r, (b_r, d), this rank's rows as they are: the caller normalises. b_r may differ between ranks and
            may be 0. float64, float32, bfloat16 or float16 (the last two are widened to float32).
        keys: K_r, (b_r, d) or more rows; row i is the positive of query i, rows from b_r on are negatives.
        logit_scale: multiplies the similarities (1 / temperature); a number or a tensor of shape () or [1], the same
            on all ranks.
        negatives: N_r, (n_r, d), further keys that are nobody's positive, such as mined hard negatives; they count for
            the queries of all ranks. On all ranks or on none; n_r may differ and may be 0.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: "gather", "ring" or "auto", as there; what travels is the queries, or keys and negatives, whichever
            are fewer.
        memory: "flat", "auto" or bytes, as there.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.info_nce_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L, with the meaning of `sync` as in :func:`wholebatch.functional.clip_loss`.
    `backward` is called on every rank, with the same incoming gradient.

    Work: 4 units of b K d multiply-adds per rank, K all keys and negatives; 3 where exp(S) is kept. Memory and
    collectives: as :func:`wholebatch.functional.clip_loss`, with the travelling tower in the place of Y, and with
    `negatives` a copy of this rank's keys and negatives below one another; where the keys travel, the all-reduce has 2
    numbers.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also fewer keys than queries, keys or negatives of another width, and negatives on some ranks only.
        RuntimeError: if the gradient is differentiated again.

    Source: van den Oord et al., 2018, arXiv:1807.03748, equation 4; with in-batch negatives, Karpukhin et al., 2020,
    arXiv:2004.04906, equation 2.

    >>> import torch, wholebatch as wb
    >>> q, n = torch.eye(3), -torch.eye(3)
    >>> wb.functional.info_nce_loss(q, q, logit_scale=10.0, negatives=n)
    tensor(0.0002)
    """

    def check() -> dict[str, str]:
        if len(keys) < len(queries):
            raise ValueError(
                f"keys must have at least as many rows as queries, got {len(keys)} and {len(queries)}; key i is the "
                "positive of query i"
            )
        return {}

    agreed = agree(
        "info_nce_loss",
        Options(group, sync, exchange, memory),
        scalars={"logit_scale": logit_scale},
        features={"queries": queries, "keys": keys, "negatives": negatives},
        optional=("negatives",),
        check=check,
    )
    keyed = [agreed.rows[name].counts for name in ("keys", "negatives") if name in agreed.rows]
    query_rows, key_rows = agreed.rows["queries"], Partition(tuple(map(sum, zip(*keyed, strict=True))))
    key_tower = tuple(range(1, 1 + len(keyed)))
    queries_travel = query_rows.total < key_rows.total
    if queries_travel:
        stays, travels, towers = key_rows, query_rows, Towers(stays=key_tower, travels=(0,))
    else:
        stays, travels, towers = query_rows, key_rows, Towers(stays=(0,), travels=key_tower)
    how, budget = agreed.exchange(stays, travels)
    rank, scale, norms = agreed.rank, agreed.scalars["logit_scale"], agreed.norms
    plan = SoftmaxPlan(
        agreed.comm,
        how,
        towers,
        Pairs(positive=(Diagonal(0, travels.offsets[rank], query_rows.counts[rank]),)),
        scale,
        bound=abs(scale) * norms["queries"] * max(norms["keys"], norms.get("negatives", 0.0)),
        softmaxes=query_rows.total,
        longest=key_rows.total,
        rows=not queries_travel,
        cols=queries_travel,
        budget=budget,
        sync=sync,
        differentiable=agreed.differentiable,
    )
    given_scale, *features = agreed.inputs
    return softmax_loss(plan, given_scale, None, features[: 1 + len(keyed)])


class InfoNCELoss(LossModule):
    """Each query against all keys and negatives: the settings of :func:`wholebatch.functional.info_nce_loss`.

    A module without parameters; `logit_scale` enters `forward`, so that it can stay inside the model that the
    engine wraps.

    Args:
        group, sync, exchange, memory: as in :func:`wholebatch.functional.info_nce_loss`.
    """

    def __init__(
        self,
        *,
        group: Group = None,
        sync: Sync = "mean",
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
    ) -> None:
        super().__init__(group, sync, exchange, memory)

    def forward(
        self, queries: Tensor, keys: Tensor, *, logit_scale: Tensor | float, negatives: Tensor | None = None
    ) -> Tensor:
        """See :func:`wholebatch.functional.info_nce_loss`: (b_r, d), (b_r, d), a scalar, (n_r, d) -> L."""
        return info_nce_loss(
            queries,
            keys,
            logit_scale=logit_scale,
            negatives=negatives,
            group=self.group,
            sync=self.sync,
            exchange=self.exchange,
            memory=self.memory,
        )
