"""Both ends of a message state what they expect, so that a mismatch is an error at both, and not garbage at one.

Only with checking on. The two statements travel at once and beside the message, so nothing waits that would not have
waited for a synchronous send.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from .call import signature
from .transport import Transport, named

_BYTES = 256
_CHANNEL_TO_RECEIVER, _CHANNEL_TO_SENDER = 2, 3


def exchange_signatures(
    transport: Transport, x: Tensor, name: str, *, sends: bool, peer: int, tag: int
) -> Callable[[], None]:
    """Tell the peer about this end, and return a function that raises ValueError if its end does not fit."""
    here, there = (_CHANNEL_TO_SENDER, _CHANNEL_TO_RECEIVER) if sends else (_CHANNEL_TO_RECEIVER, _CHANNEL_TO_SENDER)
    mine = {"what": name, "signature": signature(x)}
    text = json.dumps(mine).encode()[:_BYTES].ljust(_BYTES)
    told = transport.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), peer, tag, there)
    heard = transport.recv(torch.empty(_BYTES, dtype=torch.uint8), peer, tag, here)

    def verify() -> None:
        what = f"{name}, {mine['signature']}"
        theirs = json.loads(bytes(named(transport, what, True, heard).tolist()))
        named(transport, what, True, told)
        if theirs["signature"] != mine["signature"]:
            ends = [(transport.rank, mine), (peer, theirs)]
            sender, receiver = ends if sends else ends[::-1]
            raise ValueError(
                f"a message must have the same dtype and shape at both ends (tag {tag}): rank {sender[0]} sends "
                f"{sender[1]['signature']} in {sender[1]['what']}, rank {receiver[0]} expects "
                f"{receiver[1]['signature']} in {receiver[1]['what']}"
            )

    return verify
