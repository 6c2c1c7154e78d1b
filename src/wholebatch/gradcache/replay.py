"""The second forward pass of a chunk must be the first one again: random numbers, autocast, and buffers that move.

random numbers   of the CPU, of every accelerator, of Python and of NumPy: set back, and afterwards where they were
autocast         as it was; and in every pass its cache of weights empty: one made without gradient cuts weights off
buffers          such as BatchNorm's running averages: set back to what the chunk saw, and in the end to what the
                 first passes left: they count every chunk once
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_State = list[tuple[Callable[[Any], None], Any]]


class Replay:
    """The conditions of a forward pass about to be made.

    >>> import torch
    >>> replay = Replay()
    >>> first = torch.rand(3)
    >>> with replay.again():
    ...     second = torch.rand(3)
    >>> torch.equal(first, second)
    True
    """

    def __init__(self) -> None:
        self._random = _random_state()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _autocast_kinds()
        ]
        self._cache = torch.is_autocast_cache_enabled()

    def rewind(self) -> None:
        """Set the generators back; they go on from there."""
        _set(self._random)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, they are as they were."""
        outside = _random_state()
        self.rewind()
        try:
            with ExitStack() as stack:
                for kind, enabled, dtype in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=self._cache))
                yield
        finally:
            _set(outside)


@contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """Weights that autocast has cast inside are not used outside, nor the other way round."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _random_state() -> _State:
    """Functions that set generators, each with what sets it to where it is."""
    state: _State = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        state.append((numpy.set_state, numpy.get_state()))
    device = torch.accelerator.current_accelerator()
    if device is None:
        return state
    module = torch.get_device_module(device)
    if device.type == "mps":
        return [*state, (module.set_rng_state, module.get_rng_state())]
    if not getattr(module, "is_initialized", lambda: True)():
        return state
    for index in range(module.device_count()):
        state.append((partial(module.set_rng_state, device=index), module.get_rng_state(index)))
    return state


def _set(state: _State) -> None:
    for setter, value in state:
        setter(value)


def _autocast_kinds() -> list[str]:
    device = torch.accelerator.current_accelerator()
    return ["cpu"] if device is None else ["cpu", device.type]


class Buffers:
    """The buffers of some modules, of which forward passes may change some.

    A state is the list of those that have moved so far; what moves later was, until then, as it was in the beginning.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = {id(owner): owner for module in modules for owner in module.modules()}
        places = [(owner, name) for owner in owners.values() for name, x in owner._buffers.items() if x is not None]
        self._still = {(owner, name): _at(owner, name).clone() for owner, name in places}
        self._moving: dict[tuple[nn.Module, str], Tensor] = {}  # with what they were in the beginning
        self._replaced: dict[tuple[nn.Module, str], Tensor] = {}

    def now(self) -> list[Tensor]:
        """The state."""
        return [_at(*place).clone() for place in self._moving]

    def look(self) -> None:
        """Find out which have moved."""
        for place, beginning in [*self._still.items()]:
            if not torch.equal(_at(*place), beginning):
                self._moving[place] = self._still.pop(place)

    @torch.no_grad()
    def set(self, state: list[Tensor]) -> None:
        """Put them where they were, in place: no graph that is still to be used may need them."""
        for place, value in self._values(state):
            _at(*place).copy_(value)

    def replace(self, state: list[Tensor]) -> None:
        """The same with other tensors in their place, until `restore`: for graphs that are still to be used."""
        for (owner, name), value in self._values(state):
            held = _at(owner, name)
            self._replaced.setdefault((owner, name), held)
            owner._buffers[name] = value.clone()

    @torch.no_grad()
    def restore(self, state: list[Tensor]) -> None:
        """The buffers themselves again, with this state. Afterwards no graph may need them."""
        for (owner, name), held in self._replaced.items():
            owner._buffers[name] = held
        self._replaced.clear()
        self.set(state)

    def _values(self, state: list[Tensor]) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        beginnings = list(self._moving.values())
        return zip(self._moving, [*state, *beginnings[len(state) :]], strict=True)


def _at(owner: nn.Module, name: str) -> Tensor:
    held = owner._buffers[name]
    assert held is not None
    return held
