"""One call of an operation: its name in errors and traces, and whether all ranks must agree on its adjoint."""

from __future__ import annotations

import sys
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from .handshake import handshake
from .maps import Finish, Map
from .transport import Checked, Transport, named

if TYPE_CHECKING:
    from .order import Order


@dataclass(frozen=True)
class Call:
    """What has to be known of a call when it is run, and again when its adjoint is.

    `name` is the same on all ranks where the operation is collective. `index` is the call's place in `order`, None
    where nobody keeps account.
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
        """The order, if there is one and it still exists."""
        return self.order() if self.order is not None else None

    def again(self) -> Call:
        """The call, with the next place in its order."""
        order = self._kept_by
        return self if order is None else order.enter(self)

    def keep(self, token: Tensor, y: Tensor | None = None) -> None:
        """The backward pass has to come to this call, which gave y."""
        if order := self._kept_by:
            order.keep(self, token, y)

    def reached(self) -> None:
        """Tell the order that the backward pass has come to this call."""
        if order := self._kept_by:
            order.reached(self)

    def withdraw(self) -> None:
        """The backward pass need not come to this call."""
        order = self._kept_by
        if order is not None and self.index is not None:
            order.withdraw(self.index)

    def agree(self, map: Map, *, uses: bool = True) -> bool:
        """With checking: all ranks are about to make this call, or all raise. Returns whether any rank `uses` it."""
        if not (self.collective and map.moves_data):
            return uses or not self.collective
        if self.check is not True:
            return True
        everyone = handshake(self.transport, lambda: {"uses": uses}, caller=self.name)
        return any(facts["uses"] for facts in everyone)

    def run(self, map: Map, x: Tensor) -> Tensor:
        """map(x)."""
        return self.start(map, x)()

    def start(self, map: Map, x: Tensor) -> Finish:
        """map.start(x); what goes wrong there, or in waiting for it, is reported under this call's name."""
        what, begin = f"{self.name}, {signature(x)}", time.perf_counter()
        finish = named(self.transport, what, self.check, lambda: map.start(x.detach()))

        def finish_by_name() -> Tensor:
            y = named(self.transport, what, self.check, finish)
            if self.trace:
                took_ms = 1e3 * (time.perf_counter() - begin)
                ranks = f"rank {self.transport.rank} of {self.transport.size}"
                print(f"[{ranks}] {what} -> {signature(y)}, {took_ms:.2f} ms", file=sys.stderr, flush=True)
            return y

        return finish_by_name


def signature(x: Tensor) -> str:
    """Dtype and shape, as in `float32(4, 3)`."""
    return f"{str(x.dtype).removeprefix('torch.')}({', '.join(map(str, x.shape))})"
