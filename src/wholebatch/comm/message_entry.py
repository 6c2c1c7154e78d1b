"""Enter one end of a message. This is not collective, but with checking a mistake raises at both ends."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .._base.checks import check_integer
from .arguments import check_tensor
from .call import Call
from .entry import CallEntry, Entry
from .maps import Loss
from .messages import End, exchange_signatures, refusal
from .point_to_point import EPOCHS, SLOTS, Envelope, tags_of_one
from .transport import CHANNELS, Transport

Verify = Callable[[], bool]  # raises if the other end does not match; returns whether the message joins the backward


class MessageEntry(CallEntry):
    """Validate the entry of messages, and number them as their other ends do."""

    def __init__(self, transport: Transport, loss: Loss, check: bool | None, trace: bool | None) -> None:
        super().__init__(transport, loss, check, trace)
        self._messages = 0
        self._slots: dict[tuple[str, int, int], int] = {}

    def _enter_message(self, operation: str, x: Tensor, end: End) -> tuple[Entry, Envelope, Verify | None]:
        """Enter an end of a message; return the message's envelope, and a check of the other end for the wait."""
        self.transport.check_open()
        self._refuse_dropped_handles()
        largest = self.transport.max_tag // (CHANNELS * tags_of_one(self.transport)) - 1
        check_integer("tag", end.tag, minimum=0, maximum=largest)
        if self._epoch(end) >= EPOCHS:
            raise ValueError(
                f"{EPOCHS} messages {end.direction} rank {end.peer} with tag {end.tag} did not match their other end; "
                "use another tag"
            )
        try:
            check_tensor("x" if end.sends else "like", x)
            if end.tag and not self.transport.keeps_tags(x):
                raise ValueError(
                    f"tag must be 0 for tensors on {x.device}, got {end.tag}: there, messages of two ranks have no "
                    "tags, and arrive in the order in which they were sent"
                )
        except (ValueError, TypeError) as error:
            if not self.check or end.peer == self.rank:
                raise
            self._next_slot(end)
            self._count_failed(end)
            raise refusal(self.transport, error, operation, end) from error
        self._messages += 1
        name = f"{operation} (message #{self._messages})"
        call = Call(self.transport, name, collective=False, check=self.check, trace=self.trace)
        verify = self._verification(x, operation, end) if self.check else None
        # A receiver learns only in its wait whether the tensor that is sent requires a gradient.
        joins = x.requires_grad or not end.sends or not self.check
        entry = Entry(self._order.enter(call), joins, None)
        return entry, Envelope(end.tag, self._next_slot(end), self._epoch(end)), verify

    def _verification(self, x: Tensor, operation: str, end: End) -> Verify:
        """State this end to the peer; return the check of the peer's statement, which counts a failure."""
        agree = exchange_signatures(self.transport, x, operation, end)

        def verify() -> bool:
            try:
                return agree()
            except (ValueError, TypeError):
                self._count_failed(end)
                raise

        return verify

    def _next_slot(self, end: End) -> int:
        """Return the number of the next message; its other end counts alike."""
        number = self._slots.get(end.key, 0)
        self._slots[end.key] = number + 1
        return number % SLOTS

    def _epoch(self, end: End) -> int:
        """Return how many messages did not match; both ends know."""
        return self.transport.failed.get(end.key, 0)

    def _count_failed(self, end: End) -> None:
        """Count a message that did not match: the rest of it is then never taken for a later one."""
        self.transport.failed[end.key] = self._epoch(end) + 1
