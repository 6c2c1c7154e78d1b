"""What moves the bytes. A transport knows nothing of gradients, of checking, or of order: `Communicator` does.

Tensors come in contiguous and without gradient, and go out new. Rows lie along dimension 0. Every operation is put
under way at once and returns a function that waits for its result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from .maps import Finish

# Streams of messages that never mix: data, gradients, what either end says of itself, and the ring exchange's.
CHANNELS, RING = 5, 4


# Messages to or from a rank, by tag, that did not fit: as many at both ends, whichever communicators they belong to.
Failed = dict[tuple[str, int, int], int]

# Operations that nobody will wait for. gloo breaks its connections when one is forgotten while it is under way, and MPI
# would write into memory that has been freed: so they stay.
ABANDONED: list[object] = []


@dataclass(frozen=True)
class Message:
    """A tensor to another rank; or memory for one from there."""

    x: Tensor
    rank: int
    tag: int


class Transport(ABC):
    """W ranks that can reach each other."""

    rank: int
    size: int
    max_tag: int  # of a message, on the wire
    size_classes = 1  # of messages, each with tags of its own
    in_order = False  # whether messages of two ranks arrive in the order in which they were sent, whatever their tags
    closed = False
    group_name: str | None = None  # by which torch knows the ranks, if it does

    def __init__(self) -> None:
        self._own_messages: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.failed: Failed = {}

    @abstractmethod
    def check_open(self) -> None:
        """Raise ValueError if the ranks can no longer be reached."""

    def check_not_closed(self) -> None:
        """Raise ValueError after `close`."""
        if self.closed:
            raise ValueError(
                "this communicator has been closed; close it after its last operation and after the backward passes "
                "of its operations, or make a new one"
            )

    @abstractmethod
    def split(self, members: Sequence[int], *, member: bool, name: str) -> Transport | None:
        """The transport among `members`, ranks of this one in ascending order, for a `member`; None for the others.

        Collective over this transport; its ranks may pass different members, of which each includes the rank. `name`
        is the same on all members, and no other split of any program's has it.
        """

    @property
    def ends_with_close(self) -> bool:
        """Whether `split` made what this moves bytes over, for it alone, and it is still there."""
        return False

    def close(self) -> None:
        """Where `ends_with_close`, end what it moves bytes over. From now on every operation raises ValueError."""
        self.closed = True

    @abstractmethod
    def all_gather(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        """(n_r, ...) -> (sum n_r, ...)."""

    def all_gather_statements(self, x: Tensor) -> Finish:
        """(1, n) bytes -> (W, n): what ranks state in a handshake, kept apart on the wire from the data of a loss."""
        return self.all_gather(x, (1,) * self.size)

    def stays_on_device(self, x: Tensor) -> bool:
        """Whether x travels from device to device, so that reading what arrives would make the host wait."""
        return False

    def all_gather_by_rank(self, x: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, list[Finish]]:
        """The same, and what to wait for before a rank's rows are there."""
        return self.all_gather(x, counts)(), []

    @abstractmethod
    def reduce_scatter(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        """(sum n_r, ...) -> (n_r, ...), summed over the ranks."""

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str) -> Finish:
        """x, reduced over the ranks by `op`: "sum", "max", "min" or "prod"."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int) -> Finish:
        """Root's x."""

    @abstractmethod
    def reduce(self, x: Tensor, root: int) -> Finish:
        """x, summed over the ranks, on the root; zeros elsewhere."""

    @abstractmethod
    def gather(self, x: Tensor, counts: tuple[int, ...], root: int) -> Finish:
        """(n_r, ...) -> (sum n_r, ...) on the root, (0, ...) elsewhere."""

    @abstractmethod
    def scatter(self, x: Tensor, counts: tuple[int, ...], root: int) -> Finish:
        """(sum n_r, ...) on the root, anything of the same trailing shape elsewhere -> (n_r, ...)."""

    @abstractmethod
    def all_to_all(self, x: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]) -> Finish:
        """(sum of send_counts, ...) -> (sum of receive_counts, ...), the parts in the order of the ranks."""

    def send(self, x: Tensor, dest: int, tag: int, channel: int) -> Finish:
        """x to rank `dest`; the result is x."""
        if dest != self.rank:
            return self._send(x, dest, tag * CHANNELS + channel)
        self._own_messages[tag, channel].append(x.clone())
        return lambda: x

    def recv(self, out: Tensor, source: int, tag: int, channel: int) -> Finish:
        """A tensor like `out`, which may be written to, from rank `source`."""
        if source != self.rank:
            return self._recv(out, source, tag * CHANNELS + channel)
        return lambda: self._own_message(tag, channel)

    def swap(self, sends: Sequence[Message], receives: Sequence[Message], channel: int) -> Callable[[], list[Tensor]]:
        """All of these messages at once; the result is what was received, in the order of `receives`.

        Ranks that do not tell tags apart list messages to and from each other in the same order, and call this equally
        often: no call's messages need to be there before the next call's.
        """
        arriving = [self.recv(message.x, message.rank, message.tag, channel) for message in receives]
        leaving = [self.send(message.x, message.rank, message.tag, channel) for message in sends]

        def finish() -> list[Tensor]:
            for left in leaving:
                left()
            return [arrived() for arrived in arriving]

        return finish

    def _own_message(self, tag: int, channel: int) -> Tensor:
        messages = self._own_messages[tag, channel]
        if not messages:
            raise ValueError(f"rank {self.rank} waits for a message from itself, tag {tag}, that it has not sent")
        return messages.popleft()

    @abstractmethod
    def _send(self, x: Tensor, dest: int, wire_tag: int) -> Finish: ...

    @abstractmethod
    def _recv(self, out: Tensor, source: int, wire_tag: int) -> Finish: ...


def done(y: Tensor) -> Finish:
    """What there is nothing to wait for."""
    return lambda: y


class CommunicationError(RuntimeError):
    """An operation failed or timed out under way; the message says which one, on which rank, and what to try."""


_T = TypeVar("_T")


# Whether the ranks make sure that they make the same call: by a handshake of this call, or not at all. Losses do so
# once for all collectives of a pass: in a handshake of the loss, before the others.
Checked = Literal[True, False, "of a loss", "before"]

_HINTS: dict[Checked, str] = {
    True: "checking is on, so no rank made another call: one did not call at all. It may have failed, or its loss does "
    "not reach this operation; then every rank calls comm.backward(loss), with None for no loss",
    False: "to be told whether another rank made another call, switch checking on: check=True in the communicator or "
    "the environment variable WHOLEBATCH_CHECK=1",
    "of a loss": "one rank did not come here. It may have failed or ended, or be elsewhere: in an evaluation that one "
    "rank makes alone, or behind a data loader that gives another rank more batches",
    "before": "this call is not compared itself (check=False), a loss compares its calls once, when its forward or "
    "backward pass begins: another rank has failed or has been stopped since; look at what it says",
}


def named(transport: Transport, what: str, check: Checked, act: Callable[[], _T]) -> _T:
    """act(); a failure of the transport becomes a `CommunicationError` that says what was going on."""
    try:
        return act()
    except CommunicationError:
        raise
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CommunicationError(
            f"rank {transport.rank} of {transport.size}, in {what}: {reason}. If it waited in vain: {_HINTS[check]}"
        ) from error
