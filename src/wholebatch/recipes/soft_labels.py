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

from ..contract import entry
from ..losses._logit_scale import TakesLogitScale
from ..pair_loss import PairLoss
from ..terms import Count, LogSumExp, Mean
from ._module import Recipe


class SoftLabelCLIPLoss(TakesLogitScale, Recipe):
    """The cross-entropy of both directions, with targets in proportion to the labels that two examples share.

    Args:
        logit_scale: default for calls that leave it out, as in :class:`wholebatch.CLIPLoss`.

    >>> import torch, wholebatch as wb
    >>> x, tags = torch.eye(2), torch.ones(2, 1)  # both examples have the same tag
    >>> wb.recipes.SoftLabelCLIPLoss()(x, x, tags, tags, logit_scale=0.0)
    tensor(0.6931)
    """

    def _pair_loss(self, **options: Any) -> PairLoss:
        return PairLoss(
            {
                "all": LogSumExp(_logit),
                "target": Mean(_logit, log_weight=_log_shared),
                "sharing": Count(where=_shares),
            },
            _cross_entropy,
            column_loss=_cross_entropy,
            similarity={"features": "dot", "labels": "dot"},
            **options,
        )

    @entry
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        image_labels: Tensor,
        text_labels: Tensor,
        *,
        logit_scale: Tensor | float | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            image_features: (b_r, d), as they are: the caller normalizes.
            text_features: (b_r, d).
            image_labels: (b_r, c) numbers in the dtype of the features: 0 and 1 for tags, or anything whose products
                say how much two examples share. They get no gradient.
            text_labels: (b_r, c).
            logit_scale: multiplies the similarities (1 / temperature).
            weights: (b_r,), one for each pair, >= 0.
        """
        scale = self._settings_of_call(logit_scale=logit_scale)["logit_scale"]
        images = {"features": image_features, "labels": image_labels}
        texts = {"features": text_features, "labels": text_labels}
        numbers = {"logit_scale": scale}
        return self._compute({"images": images, "texts": texts}, numbers=numbers, weights=weights)


def _logit(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarities and fields
    logit: Tensor = p.logit_scale * s.features
    return logit


def _log_shared(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarities and fields
    return torch.log(s.labels.detach().clamp(min=0))  # -inf is no candidate


def _shares(x: Any, y: Any, s: Any) -> Tensor:  # fields and similarities
    shares: Tensor = s.labels > 0
    return shares


def _cross_entropy(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    counts = (r.sharing > 0).to(r.all.dtype)
    return (r.all - r.target) / 2, counts
