"""Messages between two ranks as linear maps, and the tags under which they travel.

A `Send` on one rank and a `Recv` on another are one map; its adjoint sends the gradient back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .maps import LinearMap
from .transport import ADJOINT, FORWARD, Finish, Transport
from .wire import start_move

SLOTS = 64  # messages of one tag whose gradients may be under way at once
EPOCHS = 64  # messages of one tag that may fail
SIZE_CLASSES = 192  # for transports on which a message that is too long would end the process that receives it


@dataclass(frozen=True)
class End:
    """One end of a message, with its numbers, which both ends count alike.

    Gradients find their message by its slot, in whatever order the ends waited. The rest of a message that did not
    match is never taken for a later one, which has another epoch.
    """

    sends: bool  # whether this rank sends
    peer: int  # the rank at the other end
    tag: int  # the user's
    slot: int = 0  # the number of the message among those of its tag
    epoch: int = 0  # the number of earlier messages that did not match
    channel: int = FORWARD  # ADJOINT for its gradient

    @property
    def key(self) -> tuple[str, int, int]:
        """The key under which messages of this direction, peer and tag are counted."""
        return "to" if self.sends else "from", self.peer, self.tag

    @property
    def adjoint(self) -> End:
        """The end of the adjoint's message."""
        return replace(self, sends=not self.sends, channel=ADJOINT if self.channel == FORWARD else FORWARD)

    def wire_tag(self, transport: Transport, x: Tensor) -> int:
        """Return the tag on the wire, for a message with x's bytes.

        Messages of one tag and size arrive in the order in which they were sent; gradients are matched by slot.
        """
        first = self.tag * tags_of_one(transport)
        if self.channel == ADJOINT:
            return first + self.slot
        sized = size_class(x.nbytes) if _has_size_class(transport, x) else 0
        return first + self.epoch * transport.size_classes + sized


@dataclass(frozen=True)
class _Message(LinearMap):
    """A tensor of this shape from one rank to another."""

    end: End
    shape: torch.Size

    def goes_in_order(self, x: Tensor) -> bool:
        return not self.transport.keeps_tags(x)


class Send(_Message):
    """Send x; the output has no entries. A* receives the gradient from there, on another channel."""

    only_sends = True

    def start(self, x: Tensor) -> Finish:
        def send(wire: Tensor) -> Finish:
            return self.transport.send(wire, self.end.peer, self.end.wire_tag(self.transport, wire), self.end.channel)

        finish = start_move(x, send)

        def no_entries() -> Tensor:
            finish()
            return x.new_empty(0)

        return no_entries

    @property
    def adjoint(self) -> LinearMap:
        return Recv(self.transport, self.end.adjoint, self.shape)


class Recv(_Message):
    """Receive a tensor; the input has no entries. A* sends the gradient there."""

    def start(self, x: Tensor) -> Finish:
        return start_move(x.new_empty(self.shape), self._receive)

    def _receive(self, out: Tensor) -> Finish:
        peer, channel, tag = self.end.peer, self.end.channel, self.end.wire_tag(self.transport, out)
        if channel == FORWARD and _has_size_class(self.transport, out) and out.numel():
            # Room for the largest message of this class: a wrong one is longer or shorter, but never too long.
            room = out.new_empty(-(-largest_of_class(size_class(out.nbytes)) // out.itemsize))
            finish = self.transport.recv(room, peer, tag, channel)
            return lambda: finish()[: out.numel()].view(out.shape)
        return self.transport.recv(out, peer, tag, channel)

    @property
    def adjoint(self) -> LinearMap:
        return Send(self.transport, self.end.adjoint, self.shape)


def _has_size_class(transport: Transport, x: Tensor) -> bool:
    return transport.size_classes > 1 and transport.keeps_tags(x)


def tags_of_one(transport: Transport) -> int:
    """Return the number of tags on the wire that one tag of the user takes."""
    return max(SLOTS, EPOCHS * transport.size_classes)


def size_class(num_bytes: int) -> int:
    """Return the class of a message of this size, four classes for each power of two.

    Every message of a class fits into the largest of the class.
    """
    k = 4 * (num_bytes - 1).bit_length() if num_bytes > 1 else 0
    while k and largest_of_class(k - 1) >= num_bytes:
        k -= 1
    return k


def largest_of_class(k: int) -> int:
    """Return the bytes of a class's largest message: 2^(k / 4), rounded down; the same integer on every machine."""
    return math.isqrt(math.isqrt(1 << k))
