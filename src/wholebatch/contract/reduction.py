"""From the losses of the local rows to the loss that every rank returns, whose backward pass all ranks begin together.

Each rank's program decides when its backward pass runs. A rank may differentiate two losses in another order, skip a
backward pass (`if not loss.isfinite(): continue`) or make an additional forward pass. Its collectives then meet those
of another call. If they fit by chance, all ranks continue with wrong gradients; if not, the processes end. So the first
node of a loss's backward pass, which is the last of its forward pass, compares

    (loss, number of the call)    and, where all ranks have the same L,    dF/dL, the incoming gradient

before any other communication. On the host this is a handshake like that of the forward pass, so that a rank in a
forward pass and a rank in a backward pass raise the same error. Between GPUs the host would have to wait for it. There,
two numbers travel from device to device, a difference makes the gradient NaN, and the next call of a loss raises.

The incoming gradients must be equal: where L is the same scalar on all ranks, so is the F computed from it, and each
rank multiplies its share of the gradient by its dF/dL. With reduction "none" each rank weighs the losses of its rows,
and there is nothing to compare.
"""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd import Function

from .._base.precision import wide_dtype
from ..comm import Communicator
from ..comm.handshake import BACKWARD, exchange
from ..comm.records import NUMBER, Statement
from ..sync import total
from .canaries import OVERFLOW
from .facts import Facts
from .group import state_of

_GRADIENT = "incoming gradient"
_TOLERANCE = 1e-5  # relative: ranks that compute the same F may round differently


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


def together(loss: Tensor, comm: Communicator, caller: str, call: int, *, one_loss: bool = True) -> Tensor:
    """Return the loss, whose backward pass begins with a comparison between the ranks, before other collectives.

    With `one_loss`, L is the same scalar on all ranks, so that dF/dL has to be the same, too.
    """
    if comm.size == 1 or not loss.requires_grad:
        return loss
    return _Together.apply(loss, comm, caller, call, one_loss)


class _Together(Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, comm: Communicator, caller: str, call: int, one_loss: bool) -> Tensor:
        ctx.comm, ctx.caller, ctx.call, ctx.one_loss = comm, caller, call, one_loss
        return loss.clone()  # not a view, because `loss /= 2` cannot change a view in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        compare = _compare_on_device if ctx.comm.transport.stays_on_device(grad) else _compare
        return compare(ctx.comm, ctx.caller, ctx.call, grad, ctx.one_loss), None, None, None, None


def _compare(comm: Communicator, caller: str, call: int, grad: Tensor, one_loss: bool) -> Tensor:
    """Return the incoming gradient, if call and gradient are the same on all ranks. Collective: one handshake."""
    numbers: list[float] = [call, grad.item()] if one_loss else [call]
    statements = state_of(comm.transport).statements
    statement = statements.get((caller, one_loss))
    if statement is None:
        facts = dict(zip((NUMBER, _GRADIENT), numbers, strict=False))
        statement = statements[caller, one_loss] = Statement(BACKWARD + caller, facts)
    everyone = exchange(comm.transport, statement.again(numbers))
    if one_loss:
        gradients = everyone.column(_GRADIENT)
        if not all(_close(value, gradients[0]) for value in gradients):
            scaled = len({math.frexp(value)[0] for value in gradients}) == 1  # their quotients are powers of two
            fix = "multiply the loss by the same factors on all ranks; to weigh a rank's examples, pass weights= to it"
            raise ValueError(
                f"{BACKWARD}{caller} #{call}: the incoming gradient must be the same on all ranks, got {gradients}: "
                + (f"{OVERFLOW}. Without one, {fix}" if scaled else f"{fix}. Or {OVERFLOW}")
            )
    return grad


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_TOLERANCE) or (math.isnan(a) and math.isnan(b))


def _compare_on_device(comm: Communicator, caller: str, call: int, grad: Tensor, one_loss: bool) -> Tensor:
    """Return the incoming gradient; NaN where ranks differ. Collective: one all-gather of two numbers, no wait."""
    dtype = wide_dtype(grad.device)
    with torch.no_grad():
        local = grad.detach().to(dtype).reshape(()) if one_loss else torch.zeros((), dtype=dtype, device=grad.device)
        code = torch.full(
            (), float(crc32(f"{caller} #{call}".encode()) >> 8), dtype=dtype, device=grad.device
        )  # 24 bits: exact
        codes, gradients = comm.transport.all_gather(torch.stack([code, local])[None], (1,) * comm.size)().unbind(1)
        same = torch.isclose(gradients, gradients[0], rtol=_TOLERANCE, atol=0.0, equal_nan=True)
        differ = ((codes != codes[0]) | ~same).any()
        canaries = state_of(comm.transport).canaries
        canaries.differed = differ.to(dtype) if canaries.differed is None else canaries.differed + differ
    return torch.where(differ, float("nan"), grad)
