"""Targets from labels that examples share: tags, concepts, or another model's features.

    q_ij = t_ij / sum_k t_ik,    t_ij = [labels of i . labels of j]_+
    L = mean over i of  -sum_j q_ij log softmax_j(scale s_ij),  and the same over columns, halved

With one label for each pair it is CLIP's loss; with equal labels it spreads the target evenly, as UniCL does. A row
that shares no label with anyone does not count. Targets under a softmax: :class:`wholebatch.DistillationLoss`.

Source: Yang et al., 2022, arXiv:2204.03610, for equal labels; Gao et al., 2023, arXiv:2303.17561, for soft ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..pair_loss import PairLoss
from ..terms import Count, LogSumExp, Mean
from .retrieval import Scale


def soft_label_info_nce(*, scale: Scale = 20.0, **options: Any) -> PairLoss:  # of PairLoss
    """Return the cross-entropy of both directions, with targets in proportion to the labels that two examples share.

    Args:
        scale: as for :func:`wholebatch.recipes.same_task_info_nce`.
        **options: likewise.

    Returns:
        A loss of ({"features": images, "labels": labels of images}, {"features": texts, "labels": labels of texts}).
        Labels are (b, c) numbers: 0 and 1 for tags, or anything whose products say how much two examples share. They
        get no gradient.

    >>> import torch, wholebatch as wb
    >>> x = {"features": torch.eye(2), "labels": torch.ones(2, 1)}  # both examples have the same tag
    >>> wb.recipes.soft_label_info_nce(scale=0.0)(x, x)
    tensor(0.6931)
    """
    return PairLoss(
        {
            "all": LogSumExp(_logit),
            "target": Mean(_logit, log_weight=_log_shared),
            "sharing": Count(where=_shares),
        },
        _cross_entropy,
        column_loss=_cross_entropy,
        similarity={"features": "dot", "labels": "dot"},
        parameters={"scale": scale},
        **options,
    )


def _logit(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarities and fields
    logit: Tensor = p.scale * s.features
    return logit


def _log_shared(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarities and fields
    return torch.log(s.labels.detach().clamp(min=0))  # -inf is no candidate


def _shares(x: Any, y: Any, s: Any) -> Tensor:  # fields and similarities
    shares: Tensor = s.labels > 0
    return shares


def _cross_entropy(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    counts = (r.sharing > 0).to(r.all.dtype)
    return (r.all - r.target) / 2, counts
