"""Give the second forward pass of a chunk the random numbers, autocast state and buffers of the first.

random numbers   generators of the CPU, every accelerator, Python and NumPy are reset, and restored afterward
autocast         the state of the first pass; its cache of weights is empty in every pass, because a weight that was
                 cached without gradient would get none
buffers          such as BatchNorm's running averages: reset to their state before the chunk, and at the end of the step
                 set to their state after the first passes, so that every chunk counts once
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._base.modules import modules_in

_State = list[tuple[Callable[[Any], None], Any]]
_Place = tuple[nn.Module, str]


class Replay:
    """The conditions of the next forward pass: random numbers, autocast, and the state of buffers.

    >>> import torch
    >>> replay = Replay()
    >>> first = torch.rand(3)
    >>> with replay.again():
    ...     second = torch.rand(3)
    >>> torch.equal(first, second)
    True
    """

    def __init__(self, buffers: Buffers | None = None) -> None:
        self._buffers = Buffers() if buffers is None else buffers
        self._state = self._buffers.now()
        self._random = _random_state()
        device = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if device is None else ["cpu", device.type]
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._cache = torch.is_autocast_cache_enabled()

    def rewind(self, *, seen: bool = True) -> None:
        """Reset random generators and buffers to the recorded state; `seen` as for `Buffers.set`."""
        self._buffers.set(self._state, seen=seen)
        _set(self._random)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the conditions inside."""
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
    """Clear autocast's cache of cast weights before and after this context."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def without_graph() -> Iterator[None]:
    """Make no graph in forward passes inside, and compute the same values as with one.

    nn.TransformerEncoder has a faster implementation without gradients, whose rows behind a padding mask differ. A
    checkpoint inside the model warns that it has no gradient, which it gets in the second pass.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), fresh_autocast_cache(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _random_state() -> _State:
    """Return functions that set generators, each with the argument for the present state."""
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


class Buffers:
    """The buffers of the modules that a step calls, some of which forward passes change.

    A state lists those that have changed so far; one that changes later had its first value until then.
    """

    def __init__(self) -> None:
        self._still: dict[_Place, Tensor] = {}  # with their first values
        self._moving: dict[_Place, Tensor] = {}
        self._written = False  # inside `kept`

    def add(self, module: nn.Module) -> None:
        """Track the buffers of a module, about to be called first; raise ValueError if one does not exist yet."""
        for place in _places(module):
            if place not in self._still and place not in self._moving:
                self._still[place] = _buffer(place).clone()

    def begin(self, module: nn.Module) -> None:
        """Record the present values of the module's buffers as their first: an engine has just set them."""
        for place in _places(module):
            if place in self._still:
                self._still[place] = _buffer(place).clone()

    def now(self) -> list[Tensor]:
        """Return the state."""
        return [_buffer(place).clone() for place in self._moving]

    def find_moved(self) -> None:
        """Find the buffers that have changed since."""
        for place, beginning in [*self._still.items()]:
            if not torch.equal(_buffer(place), beginning):
                self._moving[place] = self._still.pop(place)

    def forget_still(self) -> None:
        """Forget the buffers that have not changed: no later pass can change them."""
        self._still.clear()

    @torch.no_grad()
    def set(self, state: list[Tensor], *, seen: bool = True) -> None:
        """Restore a state: no graph that is still to be used may need the buffers.

        Without `seen`, autograd does not see it: graphs of BatchNorm hold its running averages, and use none.
        """
        self._written = self._written or seen
        first_values = [*self._moving.values()][len(state) :]  # of those that had not changed then
        for held, value in zip(map(_buffer, self._moving), [*state, *first_values], strict=True):
            if held.shape == value.shape:
                (held if seen else held.data).copy_(value)
            else:
                held.data = value.clone()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the present state at the end, if another was set: graphs of other steps may need the buffers."""
        self.find_moved()  # other passes may have changed buffers since the first pass
        state = self.now()
        try:
            yield
        finally:
            if self._written:
                self.set(state)
                self._written = False


def _places(module: nn.Module) -> Iterator[_Place]:
    """Yield the places of the buffers of a module and its children, without sparse ones: no layer changes these."""
    for owner in modules_in(module):
        for name, x in owner._buffers.items():
            if x is not None and is_lazy(x):
                raise ValueError(
                    f"buffer {name} of {type(owner).__name__} does not exist before a first call, which a step would "
                    "make twice; call the model once before"
                )
            if x is not None and x.layout is torch.strided:
                yield owner, name


def _buffer(place: _Place) -> Tensor:
    owner, name = place
    held = owner._buffers[name]
    assert held is not None
    return held
