"""The autograd nodes: one for a map, two for a map that starts in one place and is waited for in another.

The backward of each node is the map's adjoint, run through these same nodes, so that gradients can be differentiated
again. None of them writes into the gradient that autograd hands over: another branch of the graph may hold it too.

    y = map(x)                            x_bar = map.adjoint(y_bar)

    ticket = start(map, x)                x_bar  = wait(ticket')
    y      = wait(ticket)                 ticket' = start(map.adjoint, y_bar)

From bottom to top, the right column is the left one with the adjoint instead of the map: the backward of the wait
starts, and the backward of the start waits. The tickets carry no numbers, only the order.

Messages without tags find each other by the order of their starts, not of their waits. There, the backward of the start
starts and waits, so that both ends make the adjoints in the reverse order of the messages. A rank that sends a gradient
does not wait for its arrival before the end of the backward pass: the other rank may be sending too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .maps import LinearMap
from .order import Call
from .transport import Finish

# An input that always requires a gradient: the node exists, and its adjoint runs, on ranks whose x needs none.
ALWAYS = torch.empty(0, device="cpu", requires_grad=True)

_Kind = tuple[torch.Size, torch.dtype, torch.device]  # of a cotangent of zeros


def _kind(y: Tensor) -> _Kind:
    return y.shape, y.dtype, y.device


def _zeros(kind: _Kind) -> Tensor:
    shape, dtype, device = kind
    return torch.zeros(shape, dtype=dtype, device=device)


def apply(map: LinearMap, x: Tensor, call: Call) -> Tensor:
    """Return map(x), differentiable."""
    if not is_differentiable(x):
        return call.run(map, x)
    y, token = _Apply.apply(x, ALWAYS, map, call)
    call.keep(token, y)
    return y


def is_differentiable(x: Tensor) -> bool:
    """Return whether a gradient may come back to x: the same on every rank, whether or not its x requires one."""
    return torch.is_grad_enabled() and (x.is_floating_point() or x.is_complex())


class _Apply(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, always: Tensor, map: LinearMap, call: Call) -> tuple[Tensor, Tensor]:
        ctx.map, ctx.call = map, call
        ctx.set_materialize_grads(False)
        y = call.run(map, x)
        ctx.output = _kind(y)
        return y, torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _token: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        ctx.call.reached()
        adjoint: LinearMap = ctx.map.adjoint
        used = ctx.call.adjoint.validate(adjoint, uses=grad is not None)
        if not used:
            return None, None, None, None  # no rank's loss depends on it: no gradient, rather than one of zeros
        if grad is None:
            grad = _zeros(ctx.output)
        return apply(adjoint, grad, ctx.call.adjoint), None, None, None


class Flight:
    """A map between its start and its wait."""

    def __init__(self, map: LinearMap, call: Call) -> None:
        self.map, self.start_call = map, call
        self.wait_call = replace(call, name=f"wait for {call.name}", index=None)
        self._finish: Finish | None = None
        self.output: _Kind | None = None
        self.adjoint: Flight | None = None  # started by the backward of the wait
        self.in_order = False  # whether it is a message without a tag
        self.grad: Tensor | None = None  # of such a message, from its wait to its start
        self._waits_later: tuple[Call, Tensor] | None = None

    def take_off(self, x: Tensor) -> None:
        """Start map(x)."""
        self.in_order = self.map.goes_in_order(x)
        self._finish = self.start_call.start(self.map, x)

    def land(self) -> Tensor:
        """Return the result, and free all that was kept for it."""
        assert self._finish is not None
        finish, self._finish = self._finish, None
        if self._waits_later is None:
            return finish()
        call, nothing = self._waits_later
        call.finish_later(finish)
        return nothing

    def wait_later(self, call: Call, nothing: Tensor) -> None:
        """Let the wait not wait, and return `nothing`: the backward pass that reverses `call` waits at its end."""
        self._waits_later = call, nothing


def start(map: LinearMap, x: Tensor, call: Call) -> tuple[Flight, Tensor]:
    """Start map(x), differentiable; the second result is the ticket to wait with."""
    flight = Flight(map, call)
    if not is_differentiable(x):
        flight.take_off(x)
        return flight, torch.empty(0, device="cpu")
    ticket, token = _Start.apply(x, ALWAYS, flight)
    call.keep(token)
    return flight, ticket


def wait(flight: Flight, ticket: Tensor) -> Tensor:
    """Return the result of a map that is under way."""
    flight.wait_call = flight.wait_call.again()  # its place is where it is called, not where its start was
    if not (torch.is_grad_enabled() and ticket.requires_grad):
        return wait_without_gradient(flight)
    y, token = _Wait.apply(ticket, flight)
    flight.wait_call.keep(token, y)
    return y


def wait_without_gradient(flight: Flight) -> Tensor:
    """Return the result of a map under way that turned out to take no part in the backward pass."""
    flight.start_call.withdraw()
    return flight.land()


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, always: Tensor, flight: Flight) -> tuple[Tensor, Tensor]:
        ctx.flight = flight
        flight.take_off(x)
        return torch.empty(0, device="cpu"), torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, ticket_grad: Tensor, _token: Tensor) -> tuple[Tensor, None, None]:
        flight: Flight = ctx.flight
        flight.start_call.reached()
        if flight.adjoint is None:  # nothing depends on the result: y_bar = 0; or it has no tag
            grad, flight.grad = flight.grad, None
            ticket_grad = _start_adjoint(flight, grad)
        adjoint, flight.adjoint = flight.adjoint, None
        assert adjoint is not None
        if flight.in_order and adjoint.map.only_sends:
            assert flight.output is not None
            adjoint.wait_later(flight.start_call, _zeros(flight.output).new_empty(0))
        return wait(adjoint, ticket_grad), None, None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: Flight) -> tuple[Tensor, Tensor]:
        ctx.flight = flight
        y = flight.land()
        flight.output = _kind(y)
        return y, torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _token: Tensor) -> tuple[Tensor, None]:
        ctx.flight.wait_call.reached()
        if ctx.flight.in_order:
            ctx.flight.grad = grad
            return torch.empty(0, device="cpu"), None
        return _start_adjoint(ctx.flight, grad), None


def _start_adjoint(flight: Flight, grad: Tensor | None) -> Tensor:
    """Start the adjoint; its ticket is the gradient of the forward's ticket."""
    if grad is None:
        if flight.output is None:
            raise RuntimeError(
                f"{flight.start_call.name} was never waited for, so its gradient cannot be computed; "
                "call wait() on its handle before the backward pass"
            )
        grad = _zeros(flight.output)
    call = flight.start_call.adjoint
    call.validate(flight.map.adjoint)
    flight.adjoint, ticket = start(flight.map.adjoint, grad, call)
    return ticket
