"""Rows of earlier batches as further columns: cross-batch memory (XBM), for the supervised contrastive loss.

    columns = the rows of the batch, then the rows of a :class:`wholebatch.KeyQueue`, which have no gradient
    L = mean over i with a positive of  log sum_j exp(s_ij / T) - mean over positives j of s_ij / T

over the columns that are not the same example. Rows are remembered as they were: begin when they change slowly.

Source: Wang et al., 2020, arXiv:1912.06798; the loss is that of Khosla et al., 2020, arXiv:2004.11362.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_instance
from ..contract import entry, prepared
from ..losses.key_queue import KeyQueue
from ..pair_loss import PairLoss
from ..terms import Count, LogSumExp, Mean, equal, unequal
from ._module import Recipe

_OTHER_EXAMPLE, _EQUAL_LABELS = unequal("examples"), equal("labels")


class CrossBatchSupConLoss(Recipe):
    """The supervised contrastive loss of a batch against itself and the rows of earlier batches.

    Args:
        temperature: > 0; similarities are cosines. An nn.Parameter is learned.

    >>> import torch, wholebatch as wb
    >>> queue = wb.KeyQueue(8, 2, data={"labels": torch.int64, "examples": torch.int64})
    >>> rows, labels, loss_fn = torch.eye(2), torch.tensor([0, 1]), wb.recipes.CrossBatchSupConLoss(temperature=1.0)
    >>> loss_fn(rows, labels, torch.tensor([0, 1]), queue)  # no row has a positive
    tensor(0.)
    >>> queue.enqueue(rows, {"labels": labels, "examples": torch.tensor([0, 1])})
    >>> loss_fn(rows, labels, torch.tensor([2, 3]), queue)
    tensor(0.5514)
    """

    temperature: Tensor | float = 0.1

    def _pair_loss(self, **options: Any) -> PairLoss:
        return PairLoss(
            {
                "all": LogSumExp(_logit, where=_OTHER_EXAMPLE),
                "positives": Mean(_logit, where=_positive),
                "count": Count(where=_positive),
            },
            _sup_con,
            similarity="cosine",
            **options,
        )

    @entry
    def forward(
        self,
        features: Tensor,
        labels: Tensor,
        examples: Tensor,
        queue: KeyQueue,
        *,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L, the same on all ranks; then `queue.enqueue(features, {"labels": labels, "examples": examples})`.

        Args:
            features: (b_r, d), normalized inside.
            labels: (b_r,) integers; equal ones are positives. A row without a positive does not count.
            examples: (b_r,) integers, numbers in the data set; equal ones are the same example, and left out.
            queue: the rows of earlier batches, with the data `labels` and `examples`.
            weights: (b_r,), one for each row, >= 0.
        """
        ids, numbers = {"labels": labels, "examples": examples}, {"temperature": self.temperature}

        def with_queue() -> tuple[Tensor, dict[str, Tensor]]:
            check_instance("queue", queue, KeyQueue, "a wb.KeyQueue")
            return queue.columns(features, ids, group=self.group)

        columns, ids_of_columns = prepared("CrossBatchSupConLoss", self.group, with_queue)
        rows = {"features": features, "columns": columns}
        return self._compute(rows, ids=ids, y_data=ids_of_columns, numbers=numbers, weights=weights)


def _logit(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    logit: Tensor = s / p.temperature
    return logit


def _positive(x: Any, y: Any) -> Tensor:  # fields
    return _EQUAL_LABELS(x, y) & _OTHER_EXAMPLE(x, y)


def _sup_con(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    some = r.count > 0
    return torch.where(some, r.all - r.positives, 0.0), some.to(r.all.dtype)
