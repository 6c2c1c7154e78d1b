"""The loss of retrieval trainers: each query has k passages in a row, of which the first is its own.

S = x y^T / temperature,    L = CE(S, k i)        for query i of the whole batch, over the passages of all queries
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

import wholebatch as wb

from ..comm import Group
from ..contract import Reduction


def passages_loss(
    x: Tensor,
    y: Tensor,
    per_query: int,
    *,
    caller: str,
    temperature: Tensor | float = 1.0,
    reduction: Reduction = "mean",
    group: Group = None,
) -> Tensor:
    """Return the cross-entropy of all ranks' queries against all ranks' passages.

    Args:
        x: (b, d), this rank's queries.
        y: (b k, d), their passages: k for the first query, then k for the second.
        per_query: k.
        caller: named in messages.
        temperature: divides the similarities.
        reduction: "mean", "sum" or "none", as in :func:`wholebatch.functional.info_nce_loss`.
        group: ranks that share the batch.

    Raises:
        ValueError: on all ranks, if one of them has another number of passages, and for a temperature that is trained.
    """
    if isinstance(temperature, Tensor) and temperature.requires_grad:
        refuse(
            f"temperature must be a number, got a tensor that is trained: checkpoints of {caller} hold the encoder "
            "alone; to train a scale use wholebatch.integrations.sentence_transformers",
            caller,
            group,
        )
    if len(y) != per_query * len(x):
        refuse(
            f"y must have {per_query} rows for each of the {len(x)} rows of x, got {len(y)}: one positive passage and "
            f"{per_query - 1} hard negatives of each query, in a row; n_hard_negatives must fit the data",
            caller,
            group,
        )
    passages = y.unflatten(0, (len(x), per_query))
    return wb.functional.info_nce_loss(
        x,
        passages[:, 0],
        negatives=passages[:, 1:].flatten(0, 1) if per_query > 1 else None,
        logit_scale=1.0 / temperature,
        reduction=reduction,
        group=group,
    )


def refuse(message: str, caller: str, group: Group) -> NoReturn:
    """Raise ValueError on this rank, and on the others, which are in a collective of the group."""

    def state() -> NoReturn:
        raise ValueError(message)

    wb.comm.select_communicator(group).handshake(state, caller=caller)
    raise AssertionError("a handshake with an error raises")


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Return the rows of all columns of a trainer's batch, (rows, longest, ...); shorter columns end with zeros."""
    longest = max(x.shape[1] for x in columns)
    return torch.cat([pad(x, (*[0, 0] * (x.dim() - 2), 0, longest - x.shape[1])) for x in columns])
