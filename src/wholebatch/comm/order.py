"""The backward pass runs the adjoints in exactly the reverse order of the calls, on every rank.

Autograd alone does so only while all ranks build the same graph. A rank whose loss does not use a result, or that
only sent, has nothing that leads back to its call: it would never enter the adjoint, and the others wait for it.

So every call that may need a gradient leaves a token: an output without entries, which `Order` keeps. `backward`
starts at the loss, if this rank has one, and at all tokens: then every call is reached. The engine runs the nodes that
are ready by falling sequence number, that is, the youngest first. A node's consumers are younger than the node, so
the youngest node that has not run is always ready, and the nodes of one thread run in exactly the reverse order of
their creation. (One thread: with nodes on several devices the engine would use several; `backward` switches that
off.) That this holds is checked at every call.

A plain `loss.backward()` reaches what the loss depends on. That is enough where all ranks have the same graph.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import Variable

from .call import Call

_MANY = 1000  # calls without a backward pass; each keeps the graph of its input


class Order:
    """The calls on this rank that no backward pass has reversed yet; shared by a communicator and its parts."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[Call, Tensor]] = {}
        self._count = 0
        self._thread = threading.get_ident()
        self._previous: int | None = None  # the call that this pass reversed last; only in `backward`
        self._in_backward = False
        self._reached: set[int] = set()  # by a plain backward pass that is under way
        self._left: set[int] = set()  # older than what the plain pass before reached, and not reached by it
        self._ordered = False  # whether `backward` has ever been called

    def enter(self, call: Call) -> Call:
        """The call, with its place in this order."""
        self._count += 1
        return replace(call, index=self._count, order=weakref.ref(self))

    def keep(self, call: Call, token: Tensor) -> None:
        """The call's node exists, and has to run in the backward pass."""
        if in_backward():
            return  # recomputed by checkpointing, or a gradient's own graph: that pass reaches it without our help
        if not self._tokens:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():
            raise RuntimeError(
                f"{call.name}: this communicator's calls have come from two threads, which have no common order to "
                "reverse; give each thread a communicator of its own"
            )
        assert call.index is not None
        self._tokens[call.index] = call, token
        if len(self._tokens) == _MANY:
            warnings.warn(
                f"{_MANY} operations of this communicator wait for a backward pass, and keep the graphs of their "
                "inputs in memory; compute what needs no gradient under torch.no_grad()",
                RuntimeWarning,
                stacklevel=4,
            )

    def withdraw(self, index: int) -> None:
        """The call has turned out to need no adjoint, on any rank."""
        self._tokens.pop(index, None)

    def backward(self, loss: Tensor | None, gradient: Tensor | None, retain_graph: bool) -> None:
        """Run the backward pass from `loss` and from every call that is kept."""
        roots: list[Tensor] = [token for _, token in self._tokens.values()]
        gradients: list[Tensor | None] = [torch.zeros_like(token) for token in roots]
        if loss is not None and loss.requires_grad:
            roots.append(loss)
            gradients.append(gradient)
        self._ordered = True
        if not roots:
            if loss is not None:
                raise ValueError(
                    "loss does not require a gradient, and no operation of this communicator waits for one; were the "
                    "inputs detached, or the loss computed under torch.no_grad()?"
                )
            return
        kept = dict(self._tokens)
        self._in_backward, self._previous = True, None
        try:
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(roots, gradients, retain_graph=retain_graph)
            left = [call.name for call, _ in self._tokens.values()]
            assert not left, f"the backward pass left out {left}; please report this"
        finally:
            self._tokens = kept if retain_graph else {}
            self._in_backward = False

    def reached(self, call: Call) -> None:
        """The backward pass has come to the call."""
        assert call.index is not None
        self._tokens.pop(call.index, None)
        if self._in_backward:
            assert self._previous is None or call.index < self._previous, (
                f"{call.name} was reversed too late; please report this"
            )
            self._previous = call.index
        else:
            self._refuse_silent()
            self._reached.add(call.index)
            _after_this_pass(self._forget_older)

    def _refuse_silent(self) -> None:
        """A plain backward pass never comes to a send: its gradient would be missing, and its receiver would wait."""
        silent = [call.name for call, _ in self._tokens.values() if call.silent]
        if silent:
            raise RuntimeError(
                f"loss.backward() cannot reach {', '.join(silent)}: what was sent has no output here, so its gradient "
                "would be missing. Call comm.backward(loss) in its place, on every rank"
            )

    def _forget_older(self) -> None:
        """At the end of a plain pass: let go of what two such passes have left behind.

        A program that never calls `backward` may compute results that no loss uses; their graphs must not pile up. One
        that does call it may have differentiated another loss just before, and its calls must not be lost.
        """
        newest, self._reached = max(self._reached, default=0), set()
        if not self._ordered:
            self._tokens = {index: kept for index, kept in self._tokens.items() if index not in self._left}
            self._left = {index for index in self._tokens if index < newest}


def in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _after_this_pass(act: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(act)
