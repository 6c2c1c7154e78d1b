"""InfoNCE of queries and keys, with a say in what is a negative.

    L = mean over i of  -log  exp(scale s_ii) / (exp(scale s_ii) + sum over negatives j of exp(scale s_ij))

Row i of the keys answers row i of the queries. Normalize both first.

    same_task            negatives from the query's own task or data set: others are too easy, and teach to tell tasks
    distinct_document    no other passage of the same document is a negative
    near_duplicate       nor is a key that is nearly the query's own key
    mined                each query's own mined negatives count beside those of the batch

Source: one data set per batch: Nussbaum et al., 2024, arXiv:2402.01613. Mined negatives: Karpukhin et al., 2020,
arXiv:2004.04906.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from .._base.settings import check_number
from ..pair_loss import PairLoss
from ..terms import LogSumExp, other
from .parts import against_negatives, relative

Scale = float | Tensor | nn.Module


def same_task_info_nce(*, scale: Scale = 20.0, **options: Any) -> PairLoss:  # of PairLoss
    """Return InfoNCE whose negatives have the task of the query.

    Args:
        scale: a number, a tensor, or a module such as :class:`wholebatch.Scale`; a torch.nn.Parameter is learned.
        **options: group, sync, exchange, memory, reduction, precision of :class:`wholebatch.PairLoss`.

    Returns:
        A loss of (queries, keys) with `task`, integers, in `x_data` and `y_data`. Sort batches by task: blocks without
        candidates are not computed.

    >>> import torch, wholebatch as wb
    >>> rows = torch.eye(4)
    >>> task = {"task": torch.tensor([0, 0, 1, 1])}
    >>> wb.recipes.same_task_info_nce(scale=1.0)(rows, rows, x_data=task, y_data=task)
    tensor(0.3133)
    """
    terms = {"negatives": LogSumExp(relative, where=_same_task)}
    return PairLoss(terms, against_negatives, parameters={"scale": scale}, **options)


def _same_task(x: Any, y: Any) -> Tensor:  # fields
    same: Tensor = x.task == y.task
    return same & other(x, y)


def distinct_document_info_nce(*, scale: Scale = 20.0, **options: Any) -> PairLoss:  # of PairLoss
    """Return InfoNCE whose negatives come from other documents than the query's key.

    Args:
        scale: as for :func:`wholebatch.recipes.same_task_info_nce`.
        **options: likewise.

    Returns:
        A loss of (queries, keys) with `document`, integers, in `x_data` and `y_data`.
    """
    terms = {"negatives": LogSumExp(relative, where=_other_document)}
    return PairLoss(terms, against_negatives, parameters={"scale": scale}, **options)


def _other_document(x: Any, y: Any) -> Tensor:  # fields
    distinct: Tensor = x.document != y.document
    return distinct & other(x, y)


def near_duplicate_info_nce(*, threshold: float = 0.95, scale: Scale = 20.0, **options: Any) -> PairLoss:  # of PairLoss
    """Return InfoNCE whose negatives are no near duplicates of the query's key.

    Args:
        threshold: a key is a near duplicate if its cosine similarity with the query's own key is larger.
        scale: as for :func:`wholebatch.recipes.same_task_info_nce`.
        **options: likewise.

    Returns:
        A loss of ({"pairs": queries, "keys": keys}, {"pairs": keys, "keys": keys}). Under "keys" other features of the
        keys may stand, such as a frozen model's; they get no gradient.

    Raises:
        ValueError: for a threshold that is no finite number.
    """
    where = partial(_no_near_duplicate, threshold=check_number("threshold", threshold))
    return PairLoss(
        {"negatives": LogSumExp(_relative_pairs, where=where)},
        against_negatives,
        similarity={"pairs": "dot", "keys": "cosine"},
        parameters={"scale": scale},
        **options,
    )


def _relative_pairs(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    logit: Tensor = p.scale * (s.pairs - x.partner.pairs)
    return logit


def _no_near_duplicate(x: Any, y: Any, s: Any, *, threshold: float) -> Tensor:  # fields and similarity
    distinct: Tensor = s.keys <= threshold
    return distinct & other(x, y)


def mined_info_nce(*, scale: Scale = 20.0, **options: Any) -> PairLoss:  # of PairLoss
    """Return InfoNCE with each query's own mined negatives beside the keys of the batch.

    Args:
        scale: as for :func:`wholebatch.recipes.same_task_info_nce`.
        **options: likewise.

    Returns:
        A loss of (queries, keys, candidates=negatives), (b, h, d); for different numbers of negatives (n, d) with
        `candidate_offsets`, (b + 1,). A query's negatives are nobody else's; :class:`wholebatch.InfoNCELoss` shares
        them.
    """
    terms = {"negatives": LogSumExp(relative, where=other, over="both")}  # own candidates have the index -1
    return PairLoss(terms, against_negatives, parameters={"scale": scale}, **options)
