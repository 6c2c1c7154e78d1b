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
) -> Callable[[], bool]:
    """Tell the peer about this end, and return a function that raises ValueError if its end does not fit.

    It returns whether the message takes part in the backward pass: whether what is sent requires a gradient.
    """
    here, there = (_CHANNEL_TO_SENDER, _CHANNEL_TO_RECEIVER) if sends else (_CHANNEL_TO_RECEIVER, _CHANNEL_TO_SENDER)
    grad = torch.is_grad_enabled() and (x.requires_grad or not sends)
    mine = {"what": name, "signature": signature(x), "grad": grad}
    text = json.dumps(mine).encode()[:_BYTES].ljust(_BYTES)
    told = transport.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), peer, tag, there)
    heard = transport.recv(torch.empty(_BYTES, dtype=torch.uint8), peer, tag, here)

    def verify() -> bool:
        what = f"{name}, {mine['signature']}"
        theirs = json.loads(bytes(named(transport, what, True, heard).tolist()))
        named(transport, what, True, told)
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
