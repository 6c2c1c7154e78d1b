"""An error of a user's function on one rank: the rank goes on without it until no other rank waits, then all raise.

A score or a row loss may raise for the data of one rank, or run out of memory there. Were it raised at once, the others
would wait in the next collective. So the rank takes part in the collectives of this pass with zeros, and then reports
the error in a handshake: the others get it in their next one, that of the backward pass or of the next call. (On GPUs
the backward passes are compared without one. There the others wait.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.autograd import Variable

from ..comm import Communicator
from ..comm.binding import complaint

_T = TypeVar("_T")


class Failure:
    """The first error of this rank in one pass.

    Args:
        comm: the ranks.
        caller: the loss, for messages.
    """

    def __init__(self, comm: Communicator, caller: str) -> None:
        self._comm, self._caller = comm, caller
        self._error: Exception | None = None

    def guard(self, compute: Callable[[], _T], otherwise: Callable[[], _T]) -> _T:
        """Return what a function returns; what `otherwise` returns if it raises, or another one has raised."""
        if self._comm.size == 1:
            return compute()
        if self._error is None:
            try:
                return compute()
            except Exception as error:  # raised by `report`, on all ranks
                self._error = error
        return otherwise()

    def report(self) -> None:
        """Raise the error on all ranks, if there was one. No other rank waits for another collective now."""
        if self._error is not None:
            error, self._error = self._error, None
            self._comm.handshake(complaint(error), caller=self._caller)

    def report_after_backward(self) -> None:
        """Do so at the end of the running backward pass, whose other nodes may communicate as well."""
        if self._error is not None:
            Variable._execution_engine.queue_callback(self.report)
