"""The handle of a nonblocking operation, which must be waited for exactly once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._base.warnings import warn
from . import autograd
from .compiled import eager
from .transport import ABANDONED


class Handle:
    """An operation under way: `wait()` for it once, and do not write to its input before.

    A handle that is dropped leaves an operation without an end: the communicator then raises at its next call (with
    checking, on every rank), and the buffers stay in memory.
    """

    def __init__(
        self,
        flight: autograd.Flight,
        ticket: Tensor,
        x: Tensor,
        *,
        verify: Callable[[], bool] | None,
        arrange: Callable[[Tensor], Tensor | None],
        on_drop: Callable[[str], None],
    ) -> None:
        self._flight, self._ticket = flight, ticket
        self._x: Tensor | None = x
        self._version = 0 if x.is_inference() else x._version
        self._verify, self._arrange = verify, arrange
        self._on_drop = on_drop  # also keeps the communicator and its order alive
        self.name = flight.start_call.name

    @property
    def under_way(self) -> bool:
        """Whether nobody has waited for it yet."""
        return self._x is not None

    @eager
    def wait(self) -> Tensor | None:
        """Return the operation's result, None for a send.

        Raises:
            ValueError: if this handle has been waited for already, or, with checking, if the two ends of a message do
                not match.
            RuntimeError: if the operation's input was modified in place while it was under way.
            CommunicationError: if the operation failed or timed out.
        """
        if self._x is None:
            raise ValueError(f"{self.name} has been waited for already; wait once and keep the result")
        x, self._x = self._x, None
        ticket, self._ticket = self._ticket, torch.empty(0, device="cpu")
        verified = self._verify is None
        try:
            joins = self._verify is None or self._verify()
            verified = True
            y = autograd.wait(self._flight, ticket) if joins else autograd.wait_without_gradient(self._flight)
        except Exception:
            ABANDONED.append(self._flight)
            if not verified:
                self._flight.start_call.withdraw()  # there is no result, so no backward pass waits for its start
            raise
        if not x.is_inference() and x._version != self._version:
            raise RuntimeError(f"the input of {self.name} was modified in place before wait(); its result is undefined")
        return self._arrange(y)

    def __repr__(self) -> str:
        return f"<Handle of {self.name}, {'waited for' if self._x is None else 'under way'}>"

    def __del__(self) -> None:
        if getattr(self, "_x", None) is not None:
            self._on_drop(self.name)
            ABANDONED.append((self._flight, self._verify))
            warn(f"the handle of {self.name} was dropped without wait()", ResourceWarning)
