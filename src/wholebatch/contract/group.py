"""The state that the ranks of a group keep from one call of a loss to the next, looked up once in each call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ..comm.records import Statement
from ..comm.transport import Transport
from .canaries import Canaries
from .deferred import Assumption, Seen
from .forms import Form

CALL = "call"  # the fact of a handshake that numbers the call

_latest = 0  # number of the latest call of a loss on this rank, in any group


@dataclass(eq=False)
class GroupState:
    """The state of a group on this rank."""

    forms: dict[Hashable, Form] = field(default_factory=dict)  # of calls that were valid before
    canaries: Canaries = field(default_factory=Canaries)  # numbers of earlier steps that no handshake has read
    number: int = 0  # of the group's latest call
    seen: dict[Hashable, Seen] = field(default_factory=dict)  # extremes of calls with deferred checks, by their kind
    unread: list[Assumption] = field(default_factory=list)  # those whose calls have left numbers for the host
    # statements: those of handshakes in backward passes, by the loss and by whether it is one loss on all ranks
    statements: dict[tuple[str, bool], Statement] = field(default_factory=dict)

    def number_call(self, latest: Sequence[int]) -> int:
        """Return the number of a call that all ranks make, from the numbers of the latest call of each."""
        global _latest  # noqa: PLW0603
        self.number = _latest = 1 + max(latest)
        return _latest

    def number_next_call(self) -> int:
        """Return the number of a call of which the ranks read nothing: the next one of the group."""
        global _latest
        self.number, _latest = self.number + 1, max(_latest, self.number + 1)
        return self.number


def latest_call() -> int:
    """Return the number of this rank's latest call, which a handshake sends to the others."""
    return _latest


def state_of(transport: Transport) -> GroupState:
    """Return the state of a group."""
    return transport.kept_as("calls of losses", GroupState)
