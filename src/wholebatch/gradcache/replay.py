"""The second forward pass of a chunk must be the first one again: random numbers, autocast, and buffers that move.

random numbers   of the CPU, of every accelerator, of Python and of NumPy: set back, and afterwards where they were
autocast         as it was, and its cache of weights empty: one made without gradient would cut the weights off
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
                with fresh_autocast_cache():
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
    """The buffers of some modules, of which forward passes may change some."""

    def __init__(self, modules: Iterable[object]) -> None:
        owners = {id(owner): owner for module in modules if isinstance(module, nn.Module) for owner in module.modules()}
        self._all = [(owner, name) for owner in owners.values() for name, x in owner._buffers.items() if x is not None]
        self._moving: list[tuple[nn.Module, str]] | None = None

    def now(self) -> list[Tensor]:
        """Copies of those that move; of all of them, as long as nobody knows which do."""
        return [_buffer(at).clone() for at in (self._all if self._moving is None else self._moving)]

    def compare(self, before: list[Tensor]) -> list[Tensor]:
        """Find out which have moved since `now` gave the copies; returns those copies."""
        if self._moving is not None:
            return before
        moved = [not torch.equal(_buffer(at), x) for at, x in zip(self._all, before, strict=True)]
        self._moving = [at for at, has in zip(self._all, moved, strict=True) if has]
        return [x for x, has in zip(before, moved, strict=True) if has]

    @torch.no_grad()
    def set(self, values: list[Tensor]) -> None:
        """Put them where they were."""
        for (owner, name), value in zip(self._all if self._moving is None else self._moving, values, strict=True):
            held = owner._buffers[name]
            if held is not None and held.shape == value.shape:
                held.copy_(value)
            else:
                owner._buffers[name] = value.clone()


def _buffer(at: tuple[nn.Module, str]) -> Tensor:
    owner, name = at
    held = owner._buffers[name]
    assert held is not None
    return held
