"""Enter a call: check this rank's arguments and, with checking, that all ranks make the same call.

The rest of a call follows in `communicator`. Rows and their counts are entered in `row_entry`, messages in
`message_entry`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_choice, check_flag, check_instance, shown
from .arguments import check_tensor
from .binding import CallError, complaint
from .facts_by_rank import Facts
from .handshake import DTYPE, GRAD_ENABLED, NEEDS_GRAD, SHAPE, handshake
from .maps import LOSSES, Loss
from .order import Call, Order
from .transport import Checked, Transport

Counts = Sequence[int] | None

# A call begins with a handshake if `check=True` or the communicator asks for it, and in any case if it needs the other
# ranks' facts: these methods always do, those below where the caller leaves out one of the named counts.
_ALWAYS = ("handshake", "split")
_FINDS_OUT = {
    **dict.fromkeys(("all_gather", "iall_gather", "gather", "scatter"), ("counts",)),
    "all_to_all": ("send_counts", "receive_counts"),
}


@dataclass(frozen=True)
class Entry:
    """A call that may go ahead."""

    call: Call
    joins: bool  # whether it takes part in the backward pass
    everyone: Sequence[Facts] | None  # the ranks' facts, if there was a handshake

    def gradients(self) -> AbstractContextManager[object]:
        """Enable gradients inside only if they are enabled outside and the call joins."""
        return torch.set_grad_enabled(self.joins and torch.is_grad_enabled())


class CallEntry:
    """The ranks, the settings of their calls, and the account of the calls so far."""

    def __init__(self, transport: Transport, loss: Loss, check: bool | None, trace: bool | None) -> None:
        check_instance("transport", transport, Transport, "a Transport; use one of the subclasses of Communicator")
        check_choice("loss", loss, LOSSES)
        self.transport = transport
        self.loss: Loss = loss
        self.check = _switch("WHOLEBATCH_CHECK", check, default=True)
        self.trace = _switch("WHOLEBATCH_TRACE", trace, default=False)
        self._order = Order()
        self._calls = 0  # collectives so far, the same on all ranks
        self._dropped: list[str] = []  # operations whose handles were dropped, to be reported

    @property
    def rank(self) -> int:
        """Index of this process in the communicator, 0 <= rank < size."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks, W."""
        return self.transport.size

    def _enter(
        self,
        operation: str,
        x: Tensor | None,
        options: Callable[[], Mapping[str, Any]],
        check: bool | None,
        must_match: Sequence[str] = ("dtype", "shape", "op", "root"),
        *,
        counts: Mapping[str, Counts] | None = None,
        optional: bool = False,
    ) -> Entry:
        """Enter a collective.

        Args:
            operation: the method's name.
            x: this rank's tensor; None only where it is `optional`.
            options: checks the other arguments, and returns the facts about them.
            check: the caller's; None for the communicator's.
            must_match: names of facts that have to be equal on all ranks.
            counts: those of the arguments that a handshake may find out, by name.
            optional: whether this rank may pass no tensor.
        """
        self.transport.check_open()
        self._calls += 1
        name = f"{operation} #{self._calls}"
        checking = self._begins_with_handshake(operation, check, counts or {})

        def state() -> Facts:
            self._refuse_dropped_handles()
            if check is not None:
                check_flag("check", check)
            if x is not None or not optional:
                check_tensor("x", x)
            facts: Facts = {GRAD_ENABLED: torch.is_grad_enabled(), NEEDS_GRAD: x is not None and x.requires_grad}
            if x is not None:
                self.transport.use_device(x.device)
                facts |= {DTYPE: str(x.dtype), SHAPE: list(x.shape)}
            return {**facts, **options()}

        everyone = None
        if checking:
            everyone = handshake(self.transport, state, caller=name, must_match=(*must_match, GRAD_ENABLED))
        else:
            state()
        joins = everyone is None or any(facts[NEEDS_GRAD] for facts in everyone)
        checked: Checked = "before" if check is False else checking
        call = Call(self.transport, name, check=checked, trace=self.trace)
        return Entry(self._order.enter(call), joins, everyone)

    def _refuse_call(self, method: str, error: CallError, passed: Mapping[str, Any]) -> None:
        """Raise an error about arguments that do not fit a collective method, on all ranks where they check calls."""
        self.transport.check_open()
        takes = inspect.signature(getattr(type(self), method)).parameters
        shakes_hands = self._begins_with_handshake(method, passed.get("check") if "check" in takes else None, passed)
        self._calls += shakes_hands or method != "backward"  # as the ranks that made no mistake count it
        if shakes_hands:
            caller = f"{type(self).__name__}.{method}"
            handshake(self.transport, complaint(error), caller=caller, checked="of a loss")

    def _begins_with_handshake(self, method: str, check: object, arguments: Mapping[str, Any]) -> bool:
        """Return whether a call with these arguments begins with a handshake.

        A `check` that is no bool is refused there, so it counts as the communicator's.
        """
        if method in _ALWAYS or any(arguments.get(name) is None for name in _FINDS_OUT.get(method, ())):
            return True
        return check if isinstance(check, bool) else self.check

    def _checked_rank(self, name: str, rank: int) -> int:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.size:
            raise ValueError(f"{name} must be a rank of this communicator, 0 to {self.size - 1}; got {shown(rank)}")
        return rank

    def _refuse_dropped_handles(self) -> None:
        """Report once the operations that will never end."""
        if self._dropped:
            names, self._dropped = ", ".join(self._dropped), []
            raise ValueError(f"handles were dropped without wait(): {names}; keep each handle and wait for it once")


def _switch(variable: str, asked: bool | None, *, default: bool) -> bool:
    """Return the setting that the caller asked for, or that of the environment variable."""
    if asked is not None:
        return check_flag(variable.rpartition("_")[2].lower(), asked)
    value = os.environ.get(variable, str(int(default)))
    if value not in ("0", "1"):
        raise ValueError(f"the environment variable {variable} must be 0 or 1, got {value!r}")
    return value == "1"
