"""Both ends of a message state what they expect, so that a mistake at one is an error at both, and not garbage at one.

Only with checking on. The two statements travel at once and beside the message, so nothing waits that would not have
waited for a synchronous send.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .call import signature
from .transport import ABANDONED, Transport, named

_BYTES = 512
_CHANNEL_TO_RECEIVER, _CHANNEL_TO_SENDER = 2, 3
_COMPLAINT = "complaint"
_ERRORS: dict[str, type[ValueError | TypeError]] = {"ValueError": ValueError, "TypeError": TypeError}


def exchange_signatures(
    transport: Transport, x: Tensor, name: str, *, sends: bool, peer: int, tag: int
) -> Callable[[], bool]:
    """Tell the peer about this end, and return a function that raises ValueError if its end does not fit.

    It returns whether the message takes part in the backward pass: whether what is sent requires a gradient.
    """
    grad = torch.is_grad_enabled() and (x.requires_grad or not sends)
    mine = {"what": name, "signature": signature(x), "grad": grad}
    told, heard = _exchange(transport, mine, sends=sends, peer=peer, tag=tag)

    def verify() -> bool:
        what = f"{name}, {mine['signature']}"
        theirs = json.loads(bytes(named(transport, what, True, heard).tolist()))
        named(transport, what, True, told)
        if _COMPLAINT in theirs:
            raise _ERRORS[theirs["type"]](theirs[_COMPLAINT])
        ends = [(transport.rank, mine), (peer, theirs)]
        (source, sent), (dest, expected) = ends if sends else ends[::-1]
        if sent["signature"] != expected["signature"]:
            raise ValueError(
                f"a message must have the same dtype and shape at both ends (tag {tag}): rank {source} sends "
                f"{sent['signature']} in {sent['what']}, rank {dest} expects {expected['signature']} in "
                f"{expected['what']}"
            )
        if sent["grad"] and not expected["grad"]:
            raise ValueError(
                f"rank {source} sends what requires a gradient in {sent['what']}, rank {dest} receives it under "
                "torch.no_grad(): send x.detach(), or enable gradients at both ends"
            )
        return bool(sent["grad"])

    return verify


def refusal(
    transport: Transport, error: ValueError | TypeError, name: str, *, sends: bool, peer: int, tag: int
) -> ValueError | TypeError:
    """Tell the peer that there will be no message, and why; the error to raise here, which is the one that it gets."""
    kind = "TypeError" if isinstance(error, TypeError) else "ValueError"
    text = f"rank {transport.rank}, {name}: {error}"
    mine = {_COMPLAINT: text, "type": kind}
    while len(json.dumps(mine)) > _BYTES:
        text = text[: len(text) * 9 // 10]
        mine[_COMPLAINT] = text + "..."
    # The peer's statement finds its place, though nobody reads it.
    ABANDONED.append(_exchange(transport, mine, sends=sends, peer=peer, tag=tag))
    return _ERRORS[kind](mine[_COMPLAINT])


def _exchange(
    transport: Transport, mine: dict[str, Any], *, sends: bool, peer: int, tag: int
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Put this end's statement under way, and the other's."""
    here, there = (_CHANNEL_TO_SENDER, _CHANNEL_TO_RECEIVER) if sends else (_CHANNEL_TO_RECEIVER, _CHANNEL_TO_SENDER)
    text = json.dumps(mine).encode()[:_BYTES].ljust(_BYTES)
    told = transport.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), peer, tag, there)
    heard = transport.recv(torch.empty(_BYTES, dtype=torch.uint8), peer, tag, here)
    return told, heard
