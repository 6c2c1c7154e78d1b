"""With checking, both ends of a message send its dtype and shape, so that a mistake at one end raises at both.

The two statements travel at the same time as the message, so nothing waits longer than for a synchronous send.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .call import signature
from .transport import ABANDONED, Finish, Transport, named

_BYTES = 512
_CHANNEL_TO_RECEIVER, _CHANNEL_TO_SENDER = 2, 3
_COMPLAINT = "complaint"
_ERRORS: dict[str, type[ValueError | TypeError]] = {"ValueError": ValueError, "TypeError": TypeError}


@dataclass(frozen=True)
class End:
    """One end of a message: whether this rank sends, the rank at the other end, and the tag."""

    sends: bool
    peer: int
    tag: int

    @property
    def direction(self) -> str:
        """The word for errors before the peer's rank."""
        return "to" if self.sends else "from"

    @property
    def key(self) -> tuple[str, int, int]:
        """The key under which messages of this direction, peer and tag are counted."""
        return self.direction, self.peer, self.tag


def exchange_signatures(transport: Transport, x: Tensor, name: str, end: End) -> Callable[[], bool]:
    """State this end to the peer, and return a function that raises ValueError if the peer's end does not match.

    It returns whether the message takes part in the backward pass: whether the tensor that is sent requires a gradient.
    """
    grad = torch.is_grad_enabled() and (x.requires_grad or not end.sends)
    local = {"what": name, "signature": signature(x), "grad": grad}
    exchanged = _exchange(transport, local, end)

    def verify() -> bool:
        operation = f"{name}, {local['signature']}"
        theirs = json.loads(bytes(named(transport, operation, True, exchanged).tolist()))
        if _COMPLAINT in theirs:
            raise _ERRORS[theirs["type"]](theirs[_COMPLAINT])
        ends = [(transport.rank, local), (end.peer, theirs)]
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

    return verify


def refusal(transport: Transport, error: ValueError | TypeError, name: str, end: End) -> ValueError | TypeError:
    """State to the peer that there will be no message, and why; return the error, which both ends raise."""
    kind = "TypeError" if isinstance(error, TypeError) else "ValueError"
    text = f"rank {transport.rank}, {name}: {error}"
    local = {_COMPLAINT: text, "type": kind}
    while len(json.dumps(local)) > _BYTES:
        text = text[: len(text) * 9 // 10]
        local[_COMPLAINT] = text + "..."
    # The peer's statement needs a receiver, though nobody reads it.
    ABANDONED.append(_exchange(transport, local, end))
    return _ERRORS[kind](local[_COMPLAINT])


def _exchange(transport: Transport, local: dict[str, Any], end: End) -> Finish:
    """Start to send this end's statement, and to receive the other's, which is the result."""
    recv_channel, send_channel = _CHANNEL_TO_RECEIVER, _CHANNEL_TO_SENDER
    if end.sends:
        recv_channel, send_channel = send_channel, recv_channel
    text = json.dumps(local).encode()[:_BYTES].ljust(_BYTES)
    statement = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    arriving = torch.empty(_BYTES, dtype=torch.uint8, device="cpu")
    # Without tags, one of the two waits for the other, so the end that sends the message states it first. (In a batch
    # they would wait for this rank's batches with other ranks, and the ranks of a ring for each other.)
    if end.sends:
        leave = transport.send(statement, end.peer, end.tag, send_channel)
        arrive = transport.recv(arriving, end.peer, end.tag, recv_channel)
    else:
        arrive = transport.recv(arriving, end.peer, end.tag, recv_channel)
        leave = transport.send(statement, end.peer, end.tag, send_channel)

    def finish() -> Tensor:
        leave()
        return arrive()

    return finish
