"""Notice parameters that change between the two passes of a chunk: the gradient would be that of neither.

autograd counts the changes of a tensor in place (`_version`), such as an optimizer's step. It does not see changes
through `.data`, which some engines make; these have a `state`. The comparison of both passes' representations sees the
effect of others. That comparison also guards the
parameters that a model changes itself in each forward pass, such as a temperature that it clamps.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .._base.modules import parameters_in
from .chunks import Encoder
from .engines.known import Synchronized
from .observe import versions_of


class Versions:
    """The versions of the parameters of encoders, at the end of the first pass."""

    def __init__(self, encoders: Iterable[Encoder]) -> None:
        self._then: dict[int, tuple[str, Tensor, int]] = {}
        self._states: list[tuple[str, Synchronized, object]] = []
        for encoder in encoders:
            stateful = [e for e in encoder.synchronized.values() if e.control.state is not None]
            self._states += [(encoder.name, engine, _state(engine)) for engine in stateful]
            held = parameters_in(*encoder.called.values())
            if not any(engine.control.sharded for engine in encoder.synchronized.values()):
                held += encoder.leaves  # of modules that were not observed; a shard's whole parameter comes and goes
            now = versions_of(held)
            still = [p for p in held if encoder.versions.get(id(p), now[id(p)]) == now[id(p)]]
            self._then = {id(p): (encoder.name, p, now[id(p)]) for p in still} | self._then

    def check(self) -> None:
        """Raise ValueError if one has changed since."""
        now = versions_of(p for _, p, _ in self._then.values())
        for key, (name, p, version) in self._then.items():
            if now[key] != version:
                raise _change_error(f"a parameter of {name}, of shape {tuple(p.shape)}, has")
        for name, engine, state in self._states:
            if _state(engine) != state:
                raise _change_error(f"parameters of {name}, which {type(engine.module).__name__} holds, have")


def _state(engine: Synchronized) -> object:
    return None if engine.control.state is None else engine.control.state(engine.module)


def _change_error(start: str) -> ValueError:
    return ValueError(
        f"{start} been changed since the forward pass of this loss (by an optimizer's step?), so that the second pass "
        "would not repeat the first: go backward first, then change parameters"
    )
