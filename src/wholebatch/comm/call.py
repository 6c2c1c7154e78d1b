"""One call of an operation: its name in errors and traces, and whether all ranks must agree on its adjoint."""

from __future__ import annotations

import sys
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from .handshake import handshake
from .maps import Map
from .transport import Checked, Finish, Transport, named

if TYPE_CHECKING:
    from .order import Order


@dataclass(frozen=True)
class Call:
    """The settings of a call, for its run and for that of its adjoint.

    Args:
        transport: the ranks.
        name: the same on all ranks where the operation is collective.
        collective: whether all ranks make the call; a message has two ends.
        check: how the ranks make sure that they make the same call.
        trace: whether a run prints one line.
        index: the call's place in `order`; None where there is no record.
        order: the record, which the call does not keep alive.
    """

    transport: Transport
    name: str
    collective: bool = True
    check: Checked = False
    trace: bool = False
    index: int | None = None
    order: weakref.ref[Order] | None = field(default=None, repr=False)

    @property
    def adjoint(self) -> Call:
        """The call that the backward pass makes."""
        return replace(self, name=f"adjoint of {self.name}", index=None, order=None)

    @property
    def _kept_by(self) -> Order | None:
        """The record, if there is one and it still exists."""
        return self.order() if self.order is not None else None

    def again(self) -> Call:
        """Return the call with the next place in its order."""
        order = self._kept_by
        return self if order is None else order.enter(self)

    def keep(self, token: Tensor, y: Tensor | None = None) -> None:
        """Record that the backward pass must reach this call, which gave y."""
        if order := self._kept_by:
            order.keep(self, token, y)

    def reached(self) -> None:
        """Record that the backward pass has reached this call."""
        if order := self._kept_by:
            order.reached(self)

    def finish_later(self, finish: Finish) -> None:
        """Wait by `finish` at the end of the backward pass that reverses this call; at once, if no record exists."""
        if order := self._kept_by:
            order.finish_later(finish)
        else:
            finish()

    def withdraw(self) -> None:
        """Record that the backward pass need not reach this call."""
        order = self._kept_by
        if order is not None and self.index is not None:
            order.withdraw(self.index)

    def validate(self, map: Map, *, uses: bool = True) -> bool:
        """Return whether any rank `uses` the map's result; with checking, all ranks make this call or all raise."""
        if not (self.collective and map.moves_data):
            return uses or not self.collective
        if self.check is not True:
            return True
        everyone = handshake(self.transport, lambda: {"uses": uses}, caller=self.name)
        return any(facts["uses"] for facts in everyone)

    def run(self, map: Map, x: Tensor) -> Tensor:
        """Return map(x)."""
        return self.start(map, x)()

    def start(self, map: Map, x: Tensor) -> Finish:
        """Start map(x); a failure there, or in waiting for it, is reported under this call's name."""
        operation, begin = f"{self.name}, {signature(x)}", time.perf_counter()
        finish = named(self.transport, operation, self.check, lambda: map.start(x.detach()))

        def finish_by_name() -> Tensor:
            y = named(self.transport, operation, self.check, finish)
            if self.trace:
                took_ms = 1e3 * (time.perf_counter() - begin)
                ranks = f"rank {self.transport.rank} of {self.transport.size}"
                print(f"[{ranks}] {operation} -> {signature(y)}, {took_ms:.2f} ms", file=sys.stderr, flush=True)
            return y

        return finish_by_name


def signature(x: Tensor) -> str:
    """Return dtype and shape, as in `float32(4, 3)`."""
    return f"{str(x.dtype).removeprefix('torch.')}({', '.join(map(str, x.shape))})"
