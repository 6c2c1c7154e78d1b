"""Enter one end of a message. This is not collective, but with checking a mistake raises at both ends.

Both ends then send each other its dtype and shape. These statements travel at the same time as the message, so nothing
waits longer than for a synchronous send.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_integer
from .arguments import check_tensor
from .entry import CallEntry
from .order import Call, signature
from .point_to_point import EPOCHS, SLOTS, End, tags_of_one
from .transport import ABANDONED, CHANNELS, TO_RECEIVER, TO_SENDER, Finish, Transport, named

_BYTES = 512
_COMPLAINT = "complaint"
_ERRORS: dict[str, type[ValueError | TypeError]] = {"ValueError": ValueError, "TypeError": TypeError}


Verify = Callable[[], bool]  # raises if the other end does not match; returns whether the message joins the backward


def exchange_signatures(transport: Transport, x: Tensor, name: str, end: End) -> Verify:
    """State this end to the peer, and return a function that raises ValueError if the peer's end does not match."""
    grad = torch.is_grad_enabled() and (x.requires_grad or not end.sends)
    local = {"what": name, "signature": signature(x), "grad": grad}
    exchanged = _exchange(transport, local, end)

    def verify() -> bool:
        statement = named(transport, f"{name}, {local['signature']}", True, exchanged)
        try:
            return _joins(transport.rank, local, json.loads(bytes(statement.tolist())), end)
        except (ValueError, TypeError):
            _count_failure(transport, end)
            raise

    return verify


def _joins(rank: int, local: dict[str, Any], theirs: dict[str, Any], end: End) -> bool:
    """Return whether the message of two ends that match joins the backward pass: a tensor that needs a gradient."""
    if _COMPLAINT in theirs:
        raise _ERRORS[theirs["type"]](theirs[_COMPLAINT])
    ends = [(rank, local), (end.peer, theirs)]
    (source, sent), (dest, expected) = ends if end.sends else ends[::-1]
    if sent["signature"] != expected["signature"]:
        raise ValueError(
            f"a message must have the same dtype and shape at both ends (tag {end.tag}): rank {source} sends "
            f"{sent['signature']} in {sent['what']}, rank {dest} expects {expected['signature']} in "
            f"{expected['what']}"
        )
    if sent["grad"] and not expected["grad"]:
        raise ValueError(
            f"rank {source} sends a tensor that requires a gradient in {sent['what']}, rank {dest} receives it "
            "under torch.no_grad(): send x.detach(), or enable gradients at both ends"
        )
    return bool(sent["grad"])


def refusal(transport: Transport, error: ValueError | TypeError, name: str, end: End) -> ValueError | TypeError:
    """State to the peer that there will be no message, and why; return the error, which both ends raise."""
    _count_failure(transport, end)
    kind = "TypeError" if isinstance(error, TypeError) else "ValueError"
    text = f"rank {transport.rank}, {name}: {error}"
    local = {_COMPLAINT: text, "type": kind}
    while len(json.dumps(local)) > _BYTES:
        text = text[: len(text) * 9 // 10]
        local[_COMPLAINT] = text + "..."
    # The peer's statement needs a receiver, though nobody reads it.
    ABANDONED.append(_exchange(transport, local, end))
    return _ERRORS[kind](local[_COMPLAINT])


def _count_failure(transport: Transport, end: End) -> None:
    """Count a message that did not match, at both ends: the rest of it is then never taken for a later one."""
    transport.failed[end.key] = 1 + transport.failed.get(end.key, 0)


def _exchange(transport: Transport, local: dict[str, Any], end: End) -> Finish:
    """Start to send this end's statement, and to receive the other's, which is the result."""
    text = json.dumps(local).encode()[:_BYTES].ljust(_BYTES)
    statement = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    arriving = torch.empty(_BYTES, dtype=torch.uint8, device="cpu")
    # Without tags, one of the two waits for the other, so the end that sends the message states it first. (In a batch
    # they would wait for this rank's batches with other ranks, and the ranks of a ring for each other.)
    if end.sends:
        leave = transport.send(statement, end.peer, end.tag, TO_RECEIVER)
        arrive = transport.recv(arriving, end.peer, end.tag, TO_SENDER)
    else:
        arrive = transport.recv(arriving, end.peer, end.tag, TO_RECEIVER)
        leave = transport.send(statement, end.peer, end.tag, TO_SENDER)

    def finish() -> Tensor:
        leave()
        return arrive()

    return finish


class MessageEntry(CallEntry):
    """Validate the entry of messages, and number them as their other ends do."""

    def _enter_message(self, operation: str, x: Tensor, end: End) -> tuple[Call, End, Verify | None]:
        """Enter an end of a message; return it with its numbers, and a check of the other end for the wait."""
        self.transport.check_open()
        self._refuse_dropped_handles()
        largest = self.transport.max_tag // (CHANNELS * tags_of_one(self.transport)) - 1
        check_integer("tag", end.tag, minimum=0, maximum=largest)
        epoch = self.transport.failed.get(end.key, 0)
        if epoch >= EPOCHS:
            raise ValueError(
                f"{EPOCHS} messages {end.key[0]} rank {end.peer} with tag {end.tag} did not match their other end; "
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
            raise refusal(self.transport, error, operation, end) from error
        self._messages += 1
        name = f"{operation} (message #{self._messages})"
        verify = exchange_signatures(self.transport, x, operation, end) if self.check else None
        # A receiver learns only in its wait whether the tensor that is sent requires a gradient.
        joins = x.requires_grad or not end.sends or not self.check
        call = Call(self.transport, name, collective=False, check=self.check, trace=self.trace, joins=joins)
        return self._order.enter(call), replace(end, slot=self._next_slot(end), epoch=epoch), verify

    def _next_slot(self, end: End) -> int:
        """Return the number of the next message; its other end counts alike."""
        number = self._slots.get(end.key, 0)
        self._slots[end.key] = number + 1
        return number % SLOTS
