"""The calls of operations, and the backward pass, which runs their adjoints in exactly the reverse order on every rank.

Autograd alone does so only while all ranks build the same graph. A rank whose loss does not use a result, or that
only sent, has no path back to its call: it would never enter the adjoint, and the others would wait for it.

So every call that may need a gradient leaves a token: an output without entries, which `Order` keeps. `backward`
starts at the loss, if this rank has one, and at all tokens: then every call is reached. The engine runs the nodes that
are ready in falling order of their sequence numbers, the youngest first. A node's consumers are younger than the node,
so the youngest node that has not run is always ready, and the nodes of one thread run in exactly the reverse order of
their creation. (One thread: with nodes on several devices the engine would use several; `backward` switches that off.)
Every call checks this order.

A plain `loss.backward()` reaches the calls on which the loss depends. That is enough where all ranks have one graph.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from .._base.warnings import warn
from .handshake import handshake
from .maps import Map
from .transport import ABANDONED, Checked, Finish, Transport, named


@dataclass(frozen=True)
class Call:
    """The settings of a call, for its run and for that of its adjoint."""

    transport: Transport
    name: str  # the same on all ranks where the operation is collective
    collective: bool = True  # whether all ranks make the call; a message has two ends
    check: Checked = False
    trace: bool = False  # whether a run prints one line
    joins: bool = True  # whether it takes part in the backward pass
    index: int | None = None  # its place in `order`; None where there is no record
    order: weakref.ref[Order] | None = field(default=None, repr=False)  # the record, which it does not keep alive

    @property
    def adjoint(self) -> Call:
        """The call that the backward pass makes."""
        return replace(self, name=f"adjoint of {self.name}", index=None, order=None)

    def gradients(self) -> AbstractContextManager[object]:
        """Enable gradients inside only if they are enabled outside and the call joins."""
        return torch.set_grad_enabled(self.joins and torch.is_grad_enabled())

    @property
    def _kept_by(self) -> Order | None:
        """The record, if there is one and it still exists."""
        return self.order() if self.order is not None else None

    def again(self) -> Call:
        """Return the call with the next place in its order."""
        order = self._kept_by
        return self if order is None else order.enter(self)

    def keep(self, token: Tensor, y: Tensor | None = None) -> None:
        """Record that the backward pass must reach this call, which gave y."""
        if order := self._kept_by:
            order.keep(self, token, y)

    def reached(self) -> None:
        """Record that the backward pass has reached this call."""
        if order := self._kept_by:
            order.reached(self)

    def finish_later(self, finish: Finish) -> None:
        """Wait by `finish` at the end of the backward pass that reverses this call; at once, if no record exists."""
        if order := self._kept_by:
            order.leaving.append(finish)
        else:
            finish()

    def withdraw(self) -> None:
        """Record that the backward pass need not reach this call."""
        if (order := self._kept_by) and self.index is not None:
            order.withdraw(self.index)

    def validate(self, map: Map, *, uses: bool = True) -> bool:
        """Return whether any rank `uses` the map's result; with checking, all ranks make this call or all raise."""
        if not (self.collective and map.moves_data):
            return uses or not self.collective
        if self.check is not True:
            return True
        everyone = handshake(self.transport, lambda: {"uses": uses}, caller=self.name)
        return any(facts["uses"] for facts in everyone)

    def run(self, map: Map, x: Tensor) -> Tensor:
        """Return map(x)."""
        return self.start(map, x)()

    def start(self, map: Map, x: Tensor) -> Finish:
        """Start map(x); a failure there, or in waiting for it, is reported under this call's name."""
        operation, begin = f"{self.name}, {signature(x)}", time.perf_counter()
        finish = named(self.transport, operation, self.check, lambda: map.start(x.detach()))

        def finish_by_name() -> Tensor:
            y = named(self.transport, operation, self.check, finish)
            if self.trace:
                took_ms = 1e3 * (time.perf_counter() - begin)
                ranks = f"rank {self.transport.rank} of {self.transport.size}"
                print(f"[{ranks}] {operation} -> {signature(y)}, {took_ms:.2f} ms", file=sys.stderr, flush=True)
            return y

        return finish_by_name


def signature(x: Tensor) -> str:
    """Return dtype and shape, as in `float32(4, 3)`."""
    return f"{str(x.dtype).removeprefix('torch.')}({', '.join(map(str, x.shape))})"


_TOKEN = 1  # which output of a node the token is
_MANY = 1000  # calls without a backward pass; each keeps the graph of its input


class Order:
    """The calls on this rank that no backward pass has reversed yet; a communicator shares it with its parts."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._count = 0
        self._thread = threading.get_ident()
        self._previous: int | None = None  # the call that this pass reversed last; only in `backward`
        self._in_backward = False
        self._reached: set[int] = set()  # by a plain backward pass that is under way
        self.leaving: list[Finish] = []  # gradients that this pass has sent without waiting

    def waiting(self) -> list[Call]:
        """Return the calls that have to be reversed, the oldest first."""
        self._waiting = {index: pending for index, pending in self._waiting.items() if pending.root() is not None}
        return [pending.call for pending in self._waiting.values()]

    def enter(self, call: Call) -> Call:
        """Return the call with its place in this order.

        A call inside a backward pass (recomputed by checkpointing, or in a gradient's graph) gets none: that pass
        reaches it by itself.
        """
        if in_backward():
            return call
        self._count += 1
        return replace(call, index=self._count, order=weakref.ref(self))

    def keep(self, call: Call, token: Tensor, y: Tensor | None = None) -> None:
        """Record that the call's node exists, and has to run in the backward pass; y is its result."""
        if not self._waiting:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():
            raise RuntimeError(
                f"{call.name}: this communicator's calls have come from two threads, which have no common order to "
                "reverse; give each thread a separate communicator"
            )
        assert call.index is not None
        self._waiting[call.index] = _Waiting(call, token, has_entries=y is None or y.numel() > 0)
        if len(self._waiting) % _MANY == 0:
            warn(
                f"{len(self._waiting)} operations of this communicator wait for a backward pass, and keep the graphs "
                "of their inputs in memory; compute results that need no gradient under torch.no_grad()",
                RuntimeWarning,
            )

    def withdraw(self, index: int) -> None:
        """Record that the call needs no adjoint, on any rank."""
        self._waiting.pop(index, None)

    def backward(self, loss: Tensor | None, gradient: Tensor | None, retain_graph: bool) -> None:
        """Run the backward pass from `loss` and from every call that is kept."""
        waiting = self.waiting()
        roots: list[Any] = [pending.root() for pending in self._waiting.values()]
        gradients: list[Tensor | None] = [torch.empty(0, device="cpu") for _ in roots]
        if loss is not None and loss.requires_grad:
            roots.append(loss)
            gradients.append(gradient)
        if not roots:
            return
        kept = dict(self._waiting)
        self._in_backward, self._previous = True, None
        try:
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(roots, gradients, retain_graph=retain_graph)
            left = [call.name for call in waiting if call.index in self._waiting]
            assert not left, f"the backward pass left out {left}; please report this"
            while self.leaving:
                self.leaving.pop()()
        finally:
            ABANDONED.extend(self.leaving)
            self.leaving.clear()
            self._waiting = kept if retain_graph else {}
            self._in_backward = False

    def reached(self, call: Call) -> None:
        """Record that the backward pass has reached the call."""
        assert call.index is not None
        self._waiting.pop(call.index, None)
        if self._in_backward:
            assert self._previous is None or call.index < self._previous, (
                f"{call.name} was reversed too late; please report this"
            )
            self._previous = call.index
        else:
            if not call.collective or any(not waiting.collective for waiting in self.waiting()):
                self._refuse_messages()
            self._reached.add(call.index)
            Variable._execution_engine.queue_callback(self._forget_unused)

    def _refuse_messages(self) -> None:
        """Raise an error: a plain backward pass never reaches a send, so its gradient would be missing."""
        names = [call.name for call in self.waiting() if not call.collective]
        raise RuntimeError(
            f"loss.backward() cannot take part in the backward pass of messages ({', '.join(names) or 'a recv'}): a "
            "send has no output, so its gradient would be missing. Call comm.backward(loss) instead, on both ranks"
        )

    def _forget_unused(self) -> None:
        """Keep unused calls, at the end of a plain pass, only as long as others hold them, so that they do not pile up.

        This spares results without entries, as on a rank that is not the root of a gather: these are often dropped.
        """
        newest, self._reached = max(self._reached, default=0), set()
        for index, pending in self._waiting.items():
            if index < newest and pending.has_entries:
                pending.let_go()


@dataclass
class _Waiting:
    """A call that has to be reversed, and the root of its backward pass."""

    call: Call
    token: Tensor | None
    has_entries: bool
    node: Callable[[], Any] = lambda: None

    def let_go(self) -> None:
        """Keep the call's graph no longer than others do."""
        if self.token is not None:
            self.node, self.token = weakref.ref(self.token.grad_fn), None

    def root(self) -> Any:
        """Return the token, or its place in the graph if that is still alive."""
        if self.token is not None:
            return self.token
        node = self.node()
        return None if node is None else GradientEdge(node, _TOKEN)


def in_backward() -> bool:
    """Return whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1
