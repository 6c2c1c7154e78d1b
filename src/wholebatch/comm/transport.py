"""The interface that moves bytes between ranks. Gradients, checking and order are the task of `Communicator`.

Tensors come in contiguous and without gradient, and go out new. Rows lie along dimension 0. Every operation starts at
once and returns a function that waits for its result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
Finish = Callable[[], Tensor]  # waits for an operation that is under way, and returns its result

# Streams of messages that never mix: data, gradients on their way back, the two ends' statements, the ring's blocks.
CHANNELS = 5
FORWARD, ADJOINT, TO_RECEIVER, TO_SENDER, RING = range(CHANNELS)

# A gather or a reduction in parts is at most this many operations. On more ranks it is one: each of NCCL's broadcasts
# passes through all ranks one after the other, so the time of W broadcasts grows with W even if they move nothing.
MOST_PARTS = 8

# Operations that nobody will wait for. gloo breaks its connections when one is freed while it is under way, and MPI
# would write into freed memory: so they are kept.
ABANDONED: list[object] = []


@dataclass(frozen=True)
class Message:
    """A tensor to send to a rank, or memory for one that comes from there."""

    x: Tensor
    rank: int
    tag: int
    channel: int = RING


class Transport(ABC):
    """W ranks that can reach each other."""

    rank: int
    size: int
    max_tag: int  # the largest tag of a message on the wire
    size_classes = 1  # groups of message sizes, each with separate tags
    closed = False
    group_name: str | None = None  # torch's name of the process group, if there is one

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        self._messages_to_self: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.kept = {} if kept is None else kept  # of these ranks, as long as their group lives
        # The number of messages that did not match, by direction, peer and tag; both ends count alike.
        self.failed: dict[tuple[str, int, int], int] = self.kept_as("failed messages", dict)

    def kept_as(self, name: str, make: Callable[[], _T]) -> _T:
        """Return the object that these ranks keep under a name; the first call makes it."""
        if name not in self.kept:
            self.kept[name] = make()
        kept: _T = self.kept[name]
        return kept

    def check_open(self) -> None:
        """Raise ValueError if the ranks can no longer be reached."""
        self.check_not_closed()

    def check_not_closed(self) -> None:
        """Raise ValueError after `close`."""
        if self.closed:
            raise ValueError(
                "this communicator has been closed; close it after its last operation and after the backward passes "
                "of its operations, or make a new one"
            )

    @abstractmethod
    def split(self, members: Sequence[int], *, member: bool, name: str) -> Transport | None:
        """Return the transport among `members` if this rank is a `member`, else None.

        Collective over this transport. `members` are ranks of this transport in ascending order; ranks may pass
        different members, and a member's list includes itself. `name` is the same on all members, and no other split of
        any program uses it.
        """

    @property
    def ends_with_close(self) -> bool:
        """Whether `split` made the group or MPI communicator below, for this transport alone, and it still exists."""
        return False

    def close(self) -> None:
        """Refuse every later operation with a ValueError; where `ends_with_close`, free the group below."""
        self.closed = True

    @abstractmethod
    def all_gather(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        """Concatenate the ranks' rows: (n_r, ...) -> (sum n_r, ...)."""

    def all_gather_statements(self, x: Tensor) -> Finish:
        """Gather the statements of a handshake, (1, n) bytes -> (W, n), apart from a loss's data on the wire."""
        return self.all_gather(x, (1,) * self.size)

    def stays_on_device(self, x: Tensor) -> bool:
        """Whether x travels from device to device, so that reading the result would make the host wait."""
        return False

    def keeps_tags(self, x: Tensor) -> bool:
        """Whether messages of x's device have tags. Without, those of two ranks arrive as they were sent."""
        return True

    def use_device(self, device: torch.device) -> None:  # noqa: B027  # most transports have one device
        """Let numbers from the host travel on this device, where the ranks have no other way."""

    def all_gather_by_rank(self, x: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, list[Finish]]:
        """Return the result of `all_gather`, and for each rank a function that waits for its rows.

        With an empty list, all rows have arrived.
        """
        return self.all_gather(x, counts)(), []

    @abstractmethod
    def reduce_scatter(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        """Sum over the ranks and distribute the rows: (sum n_r, ...) -> (n_r, ...)."""

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str) -> Finish:
        """Reduce x over the ranks by `op`: "sum", "max", "min" or "prod"."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int) -> Finish:
        """Give every rank the root's x."""

    @abstractmethod
    def reduce(self, x: Tensor, root: int) -> Finish:
        """Sum x over the ranks; the result is on the root, zeros elsewhere."""

    def reduce_(self, x: Tensor, root: int) -> Finish:
        """Sum x over the ranks; the result is on the root, elsewhere undefined. x may be overwritten."""
        return self.reduce(x, root)

    @abstractmethod
    def all_to_all(self, x: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]) -> Finish:
        """Send each rank its part, in rank order: (sum of send_counts, ...) -> (sum of receive_counts, ...)."""

    def send(self, x: Tensor, dest: int, tag: int, channel: int) -> Finish:
        """Send x to rank `dest`; the result is x."""
        if dest != self.rank:
            return self._send(x, dest, tag * CHANNELS + channel)
        self._messages_to_self[tag, channel].append(x.clone())
        return lambda: x

    def recv(self, out: Tensor, source: int, tag: int, channel: int) -> Finish:
        """Receive a tensor like `out`, which may be overwritten, from rank `source`."""
        if source != self.rank:
            return self._recv(out, source, tag * CHANNELS + channel)
        return lambda: self._message_to_self(tag, channel)

    def swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        """Exchange all of these messages at once; the result has the received tensors in the order of `receives`.

        Ranks whose transport ignores tags list messages to and from each other in the same order, and call this equally
        often: no call's messages need to arrive before the next call's.
        """
        arriving = [self.recv(message.x, message.rank, message.tag, message.channel) for message in receives]
        leaving = [self.send(message.x, message.rank, message.tag, message.channel) for message in sends]

        def finish() -> list[Tensor]:
            for left in leaving:
                left()
            return [arrived() for arrived in arriving]

        return finish

    def _message_to_self(self, tag: int, channel: int) -> Tensor:
        messages = self._messages_to_self[tag, channel]
        if not messages:
            raise ValueError(f"rank {self.rank} waits for a message from itself, tag {tag}, that it has not sent")
        return messages.popleft()

    @abstractmethod
    def _send(self, x: Tensor, dest: int, wire_tag: int) -> Finish: ...

    @abstractmethod
    def _recv(self, out: Tensor, source: int, wire_tag: int) -> Finish: ...


def done(y: Tensor) -> Finish:
    """Return the `Finish` of an operation that is complete already."""
    return lambda: y


class CommunicationError(RuntimeError):
    """An operation failed or timed out under way; the message names the operation and the rank, and suggests a fix."""


# How the ranks make sure that they make the same call: by a handshake of this call (True), not at all (False), or once
# for all collectives of a loss's pass: in the handshake "of a loss", "before" the others.
Checked = Literal[True, False, "of a loss", "before"]

_HINTS: dict[Checked, str] = {
    True: "checking is on, so no rank made another call: one did not call at all. It may have failed, or its loss does "
    "not reach this operation; then every rank calls comm.backward(loss), with None for no loss",
    False: "to find out whether another rank made another call, switch checking on: check=True in the communicator or "
    "the environment variable WHOLEBATCH_CHECK=1",
    "of a loss": "one rank did not come here. It may have failed or ended, or be elsewhere: in an evaluation that one "
    "rank makes alone, or behind a data loader that gives another rank more batches",
    "before": "this call is not compared itself (check=False), a loss compares its calls once, when its forward or "
    "backward pass begins: another rank has failed or has been stopped since; read its error message",
}


def named(transport: Transport, name: str, check: Checked, act: Callable[[], _T]) -> _T:
    """Return act(); a failure of the transport becomes a `CommunicationError` that names the operation `name`."""
    try:
        return act()
    except CommunicationError:
        raise
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CommunicationError(
            f"rank {transport.rank} of {transport.size}, in {name}: {reason}. If it waited in vain: {_HINTS[check]}"
        ) from error
