"""Reduce the losses of the local rows to the loss that every rank returns."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sync import total
from .backward import together
from .facts import Facts


def reduce_losses(facts: Facts, losses: Tensor, count: int | Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the weighted mean or sum over all ranks' rows, or with reduction "none" this rank's weighted losses.

    Args:
        facts: of the call.
        losses: (b_r,), of the local rows; 0 for rows that do not count.
        count: the number of rows of all ranks that count.
        counted: (b_r,), whether each local row counts; None: all do.
    """
    weights = facts.inputs["weights"]
    if weights is not None:
        losses = weights.to(losses) * losses
    if facts.options.reduction == "none":
        return finish(facts, losses, one_loss=False)
    return reduce_total(facts, losses.sum(), count, counted)


def reduce_total(facts: Facts, share: Tensor, count: int | Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the mean or the sum over all ranks, from this rank's weighted sum.

    Collective: one all-reduce of a number, two with weights.
    """
    loss, weights = total(facts.comm, share), facts.inputs["weights"]
    if facts.options.reduction == "mean" and weights is None:
        loss = loss / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))
    elif facts.options.reduction == "mean":
        weights = weights.to(loss) if counted is None else weights.to(loss) * counted
        weight = total(facts.comm, weights.sum())
        loss = torch.where(weight > 0, loss / weight.clamp(min=torch.finfo(loss.dtype).tiny), 0.0)
    return finish(facts, loss)


def finish(facts: Facts, loss: Tensor, *, one_loss: bool = True) -> Tensor:
    """Return the loss in the caller's dtype; its backward pass begins by comparing the ranks, see `together`."""
    loss = loss.to(facts.loss_dtype)
    if facts.deferred is not None:
        loss = facts.deferred.finish(loss)
    return together(loss, facts.comm, facts.caller, facts.call, one_loss=one_loss)
