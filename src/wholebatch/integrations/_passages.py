"""The loss of retrieval trainers: each query has k passages in a row, of which the first is its own.

S = x y^T / temperature,    L = CE(S, k i)        for query i of the whole batch, over the passages of all queries
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

import wholebatch as wb

from ..comm import Group
from ..contract import Reduction, prepared


def passages_loss(
    x: Tensor,
    y: Tensor,
    per_query: int | None = None,
    *,
    caller: str,
    temperature: Tensor | float = 1.0,
    reduction: Reduction = "mean",
    group: Group = None,
) -> Tensor:
    """Return the cross-entropy of all ranks' queries x, (b, d), against all ranks' passages y, (b k, d).

    k is `per_query`; None: it follows from the rows, of which each rank must have some.
    """

    def passages_by_query() -> Tensor:
        if isinstance(temperature, Tensor) and temperature.requires_grad:
            raise ValueError(
                f"temperature must be a number, got a tensor that is trained: checkpoints of {caller} hold the encoder "
                "alone; to train a scale use wholebatch.integrations.sentence_transformers"
            )
        if per_query is None and (not len(x) or len(y) % len(x)):
            raise ValueError(
                f"{caller}'s batch must have the same number of passages for each query, got {len(x)} queries and "
                f"{len(y)} passages"
            )
        k = len(y) // len(x) if per_query is None else per_query
        if len(y) != k * len(x):
            raise ValueError(
                f"y must have {k} rows for each of the {len(x)} rows of x, got {len(y)}: one positive passage "
                f"and {k - 1} hard negatives of each query, in a row; n_hard_negatives must fit the data"
            )
        return y.unflatten(0, (len(x), k))

    passages = prepared(caller, group, passages_by_query)
    return wb.functional.info_nce_loss(
        x,
        passages[:, 0],
        negatives=passages[:, 1:].flatten(0, 1) if passages.shape[1] > 1 else None,
        logit_scale=1.0 / temperature,
        reduction=reduction,
        group=group,
    )


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Return the rows of all columns of a trainer's batch, (rows, longest, ...); shorter columns end with zeros."""
    longest = max(x.shape[1] for x in columns)
    return torch.cat([pad(x, (*[0, 0] * (x.dim() - 2), 0, longest - x.shape[1])) for x in columns])
