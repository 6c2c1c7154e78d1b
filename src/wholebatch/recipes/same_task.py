"""InfoNCE of queries and keys whose negatives come from the query's own task or data set.

    L = mean over i of  -log  exp(scale s_ii) / (exp(scale s_ii) + sum over negatives j of exp(scale s_ij))
      = mean over i of  log(1 + exp N_i),    N_i = logsumexp over negatives j of scale (s_ij - s_ii)

The last form has no difference of two large numbers, so a loss near 0 keeps its digits. Negatives of other tasks are
too easy, and teach to tell tasks.

Source: one data set per batch: Nussbaum et al., 2024, arXiv:2402.01613.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..contract import entry
from ..logsumexp import softplus
from ..losses._logit_scale import TakesLogitScale
from ..pair_loss import PairLoss
from ..terms import LogSumExp, equal, other
from ._module import Recipe

_EQUAL_TASKS = equal("tasks")


class SameTaskInfoNCELoss(TakesLogitScale, Recipe):
    """InfoNCE whose negatives have the task of the query.

    Args:
        logit_scale: default for calls that leave it out, as in :class:`wholebatch.CLIPLoss`.

    >>> import torch, wholebatch as wb
    >>> rows = torch.eye(4)
    >>> wb.recipes.SameTaskInfoNCELoss(logit_scale=1.0)(rows, rows, torch.tensor([0, 0, 1, 1]))
    tensor(0.3133)
    """

    def _pair_loss(self, **options: Any) -> PairLoss:
        return PairLoss({"negatives": LogSumExp(_relative, where=_same_task)}, _cross_entropy, **options)

    @entry
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        tasks: Tensor,
        *,
        logit_scale: Tensor | float | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            queries: (b_r, d), as they are: the caller normalizes.
            keys: (b_r, d); row i answers query i.
            tasks: (b_r,) integers. Sort batches by task: blocks without candidates are not computed.
            logit_scale: multiplies the similarities (1 / temperature).
            weights: (b_r,), one for each query, >= 0.
        """
        scale = self._settings_of_call(logit_scale=logit_scale)["logit_scale"]
        features, numbers = {"queries": queries, "keys": keys}, {"logit_scale": scale}
        return self._compute(features, ids={"tasks": tasks}, numbers=numbers, weights=weights)


def _relative(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    logit: Tensor = p.logit_scale * (s - x.partner)
    return logit


def _same_task(x: Any, y: Any) -> Tensor:  # fields
    return _EQUAL_TASKS(x, y) & other(x, y)


def _cross_entropy(r: Any, x: Any, p: Any) -> Tensor:  # fields
    return softplus(r.negatives)
