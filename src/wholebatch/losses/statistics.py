"""Statistics of the batch that a loss can report beside its value, from numbers that its sweep computes anyway.

A loss computes them when it is called through :func:`with_statistics`, see `contract.options`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple, ParamSpec, overload

import torch
from torch import Tensor

from .._base.checks import check_callable
from ..comm import Communicator
from ..contract.options import collecting, report
from ..nodes.row_statistics import RowStatistics
from ..pair_loss import PairLoss, TermStatistics

_P = ParamSpec("_P")


class BatchStatistics(NamedTuple):
    """Means over all softmaxes of the global batch: scalars without gradient, the same on all ranks.

    Attributes:
        accuracy: the share of rows whose (mean) positive is more similar than every negative.
        positive_similarity: mean similarity of positives, in the units of x . y.
        hardest_negative_similarity: mean over rows of the largest similarity of a negative.
        effective_negatives: mean over rows of (sum_j p_j)^2 / sum_j p_j^2 over the negatives, p the softmax: this many
            equally hard negatives would have the same value.
        temperature: 1 / scale.

    The first two are means over rows with a positive (a row without a negative counts as accurate), the next two over
    rows with a negative; a mean over no rows is NaN.
    """

    accuracy: Tensor
    positive_similarity: Tensor
    hardest_negative_similarity: Tensor
    effective_negatives: Tensor
    temperature: Tensor


class LossAndStatistics(NamedTuple):
    """A loss, and the statistics of the batch from which it was computed.

    Attributes:
        loss: the loss.
        statistics: a :class:`BatchStatistics`, or of a declared loss a :class:`wholebatch.TermStatistics`.
    """

    loss: Tensor
    statistics: BatchStatistics


@overload
def with_statistics(loss: PairLoss) -> Callable[..., tuple[Tensor, TermStatistics]]: ...
@overload
def with_statistics(loss: Callable[_P, Tensor]) -> Callable[_P, LossAndStatistics]: ...
def with_statistics(loss: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, BatchStatistics | TermStatistics]]:
    """Return a function with the arguments of a loss that returns :class:`LossAndStatistics`.

    Args:
        loss: a function or a module of a loss with statistics, such as CLIP (docs/losses.md lists them), a
            :class:`wholebatch.PairLoss`, or anything that calls one of them once, such as a
            :class:`wholebatch.GradCache`.

    Either every rank asks for statistics or none. Collective: those of the loss, and one all-reduce. No further sweep.

    Raises:
        ValueError: on every rank if only some ranks ask for statistics; also if the call has computed no loss with
            statistics, or more than one.

    >>> import torch, wholebatch as wb
    >>> x = torch.eye(3)
    >>> value, statistics = wb.with_statistics(wb.functional.clip_loss)(x, x, logit_scale=10.0)
    >>> statistics.accuracy
    tensor(1., dtype=torch.float64)
    """
    check_callable("loss", loss)

    @wraps(loss, updated=())
    def call(*args: Any, **kwargs: Any) -> LossAndStatistics:  # the loss's
        reported: list[Any] = []
        with collecting(reported):
            value = loss(*args, **kwargs)
        if len(reported) != 1:
            losses = ", ".join([*_losses_with_statistics(), "PairLoss"])
            raise ValueError(
                f"with_statistics needs a call that computes one loss with statistics ({losses}), got {len(reported)}; "
                "wrap the call of a single one"
            )
        return LossAndStatistics(value, reported[0])

    return call


def _losses_with_statistics() -> list[str]:
    """Return the functions of this package whose files import `report_statistics`."""
    losses = {name: value for name, value in vars(import_module(__package__)).items() if name.endswith("_loss")}
    return [name for name, value in losses.items() if hasattr(import_module(value.__module__), "report_statistics")]


@torch.no_grad()
def report_statistics(comm: Communicator, scale: float | Tensor, sides: Sequence[tuple[RowStatistics, Tensor]]) -> None:
    """Report the statistics of a loss to the caller that has requested them. Collective: one all-reduce.

    Args:
        comm: the ranks.
        scale: of S.
        sides: for each softmax, the statistics of its rows and the logits of their (mean) positives, NaN without one.
    """
    sums = []
    for side, target in sides:
        assert side.largest is not None
        assert side.effective is not None
        has_positive, has_negative = ~target.isnan(), ~side.largest.isneginf()
        for values, where in (
            ((target > side.largest).to(target), has_positive),
            (target / scale, has_positive),
            (side.largest / scale, has_negative),
            (side.effective, has_negative),
        ):
            sums.append(torch.stack([torch.where(where, values, 0.0).sum(), where.sum().to(values)]))
    totals = comm.all_reduce(torch.stack(sums).unflatten(0, (len(sides), 4)).sum(0), check=False)
    accuracy, positive, hardest, effective = (totals[:, 0] / totals[:, 1]).unbind()
    report(BatchStatistics(accuracy, positive, hardest, effective, torch.ones_like(accuracy) / scale))
