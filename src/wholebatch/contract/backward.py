"""The start of a loss's backward pass: all ranks are in one call with the same incoming gradient, or all raise.

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
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd import Function

from .._base.precision import wide_dtype
from ..comm import Communicator
from ..comm.handshake import BACKWARD, exchange
from ..comm.records import NUMBER, Statement
from ..comm.transport import Transport

_GRADIENT = "incoming gradient"
_NUMBER = "number of the latest call"  # the name under which a group keeps it
_TOLERANCE = 1e-5  # relative: ranks that compute the same F may round differently
# The number of backward passes that differed, on the device, not read back yet: a group keeps it under this name.
EARLIER = "earlier backward passes that differed"
_OVERFLOW = (
    "a GradScaler has found an overflow on one rank alone and skipped the step there, so the weights have parted: "
    "resume from a checkpoint, and call wholebatch.heads.agree_on_overflow(scaler, *optimizers) after scaler.unscale_"
)
CALL = "call"  # the fact of a handshake that numbers the call

_latest = 0  # number of the latest call of a loss on this rank


def latest_call() -> int:
    """Return the number of this rank's latest call, which a handshake sends to the others."""
    return _latest


def number_call(transport: Transport, latest: Sequence[int]) -> int:
    """Return the number of a call that all ranks make, from the numbers of the latest call of each."""
    global _latest  # noqa: PLW0603
    transport.kept[_NUMBER] = _latest = 1 + max(latest)
    return _latest


def number_next_call(transport: Transport) -> int:
    """Return the number of a call of which the ranks read nothing: the next one of the group."""
    global _latest
    number: int = transport.kept[_NUMBER] + 1
    transport.kept[_NUMBER], _latest = number, max(_latest, number)
    return number


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
    statements: dict[tuple[str, bool], Statement] = comm.transport.kept_as("statements of backward passes", dict)
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
                + (f"{_OVERFLOW}. Without one, {fix}" if scaled else f"{fix}. Or {_OVERFLOW}")
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
        before = comm.transport.kept.get(EARLIER)
        comm.transport.kept[EARLIER] = differ.to(dtype) if before is None else before + differ
    return torch.where(differ, float("nan"), grad)


def differed(transport: Transport) -> dict[str, Tensor]:
    """Return the number on the device that the next handshake must read back as well, by name; {} without one."""
    count = transport.kept.get(EARLIER)
    return {} if count is None else {EARLIER: count}


def check_earlier(transport: Transport, read_back: Mapping[str, float]) -> None:
    """Raise ValueError if ranks differed in an earlier backward pass: on all ranks, because all compared the same."""
    transport.kept.pop(EARLIER, None)
    if read_back.get(EARLIER):
        raise ValueError(
            "an earlier backward pass was not the same on all ranks: they were in the backward passes of different "
            "losses or calls, or had different incoming gradients; the gradients of that step are NaN. Run the same "
            f"backward passes in the same order on all ranks, and multiply the loss by the same factors. Or {_OVERFLOW}"
        )
