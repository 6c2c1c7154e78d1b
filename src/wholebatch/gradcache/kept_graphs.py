"""The choice of chunks that keep the graph of their first pass, and so need no second pass.

number     that many chunks, the first of a step
fraction   that part of all chunks
"auto"     as many as fit: the memory of a chunk's graph is measured, and room for one replayed chunk is left
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._base.checks import shown
from .._base.modules import parameters_in
from .._base.trees import tensors_of
from .._measure import free_memory

KeepGraphs = int | float | Literal["auto"]
_Place = torch.device | Literal["all devices"]
_ALL: Literal["all devices"] = "all devices"
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}
_SHARE = 0.8  # of the free memory; the rest is for the loss, gradients and the allocator's fragments


def check_keep_graphs(keep: object, memory_budget: object) -> None:
    """Raise ValueError unless it is a number of chunks, a fraction of them, or "auto"."""
    number = isinstance(keep, int) and not isinstance(keep, bool) and keep >= 0
    fraction = isinstance(keep, float) and 0.0 <= keep <= 1.0
    auto = isinstance(keep, str) and keep == "auto"
    if not (number or fraction or auto):
        raise ValueError(
            f"keep_graphs must be a number of chunks, a fraction from 0.0 to 1.0, or 'auto'; got {shown(keep)}"
        )
    if memory_budget is not None and (not auto or type(memory_budget) is not int or memory_budget < 0):
        raise ValueError(
            f"memory_budget is a number of bytes for keep_graphs='auto', got {shown(memory_budget)} for {keep!r}"
        )


class Keeper:
    """Decide, chunk by chunk, which graphs are kept."""

    def __init__(
        self,
        keep: KeepGraphs,
        chunks: int,  # how many the step has, over all models
        budget: int | None,  # bytes on all devices together; None: a share of the free memory of each device
        devices: Sequence[Sequence[torch.device]],  # of each model
    ) -> None:
        self._auto, self._devices = keep == "auto", devices
        self._left = 0 if isinstance(keep, str) else round(keep * chunks) if isinstance(keep, float) else keep
        self._bytes: dict[_Place, int] = {}
        if self._auto and budget is None:
            self._bytes = {device: _share_of_free(device) for model_devices in devices for device in model_devices}
        elif self._auto:
            self._bytes = {_ALL: budget or 0}
        self._costs: dict[int, dict[_Place, int]] = {}

    def wants(self, model: int) -> bool:
        """Return whether the next chunk, of this model, may keep its graph."""
        return self._fits(model) if self._auto else self._left > 0

    @contextmanager
    def measured(self, model: int, existing: Iterable[Tensor]) -> Iterator[None]:
        """Measure the memory of the graph that is made inside, without tensors that exist anyway."""
        if not self._auto:
            yield
            return
        with _graph_memory(self._devices[model], existing) as held:
            yield
        costs = self._costs.setdefault(model, {})
        for place, num_bytes in ({_ALL: sum(held.values())} if _ALL in self._bytes else held).items():
            costs[place] = max(costs.get(place, 0), num_bytes)

    def kept(self, model: int) -> bool:
        """Return whether the graph that was just made stays; if so, count it."""
        if not self._auto:
            self._left -= 1
            return True
        if not self._fits(model):
            return False
        for place in self._places(model):
            self._bytes[place] -= self._costs[model].get(place, 0)
        return True

    def stop(self) -> None:
        """Keep no more graphs."""
        self._auto, self._left = False, 0

    def _places(self, model: int) -> Sequence[_Place]:
        return [_ALL] if _ALL in self._bytes else self._devices[model]

    def _fits(self, model: int) -> bool:
        """Return whether there is room for a graph of this model, and for one replayed chunk of any model."""
        costs = self._costs.get(model, {})
        return all(
            self._bytes[place]
            >= costs.get(place, 0) + max((other.get(place, 0) for other in self._costs.values()), default=0)
            for place in self._places(model)
        )


@contextmanager
def _graph_memory(devices: Iterable[torch.device], existing: Iterable[Tensor]) -> Iterator[dict[_Place, int]]:
    """Yield a dict, which afterward has the bytes that the graph made inside holds on each device.

    CUDA counts allocated memory. On other devices tensors are counted when they are saved.
    """
    held: dict[_Place, int] = dict.fromkeys(devices, 0)
    before = {device: torch.cuda.memory_allocated(device) for device in devices if device.type == "cuda"}
    seen = {memory.data_ptr() for x in existing for memory in _memory_of(x)}

    def count(x: Tensor) -> tuple[Tensor, int]:
        for memory in _memory_of(x):
            if memory.data_ptr() not in seen and x.device.type != "cuda":
                seen.add(memory.data_ptr())
                held[x.device] = held.get(x.device, 0) + memory.nbytes()
        return x.detach(), x._version

    with saved_tensors_hooks(count, _check_unchanged) if len(before) < len(held) else nullcontext():
        yield held
    for device, allocated in before.items():
        held[device] = torch.cuda.memory_allocated(device) - allocated


def _check_unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return the saved tensor, unless it has been changed since; with hooks, autograd does not check this."""
    x, version = saved
    if x._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} that the gradient needs has been modified by an inplace operation "
            "after its chunk's forward pass: clone a tensor that later chunks change, or keep no graphs"
        )
    return x


def _memory_of(x: Tensor) -> list[torch.UntypedStorage]:
    if x.layout is torch.strided:
        return [x.untyped_storage()]
    parts = [getattr(x, part, None) for part in _PARTS[x.layout]] if x.layout in _PARTS else []
    return [part.untyped_storage() for part in (part() for part in parts if part is not None)]


def _share_of_free(device: torch.device) -> int:
    free = free_memory(device)
    if free is None:
        raise ValueError(f"keep_graphs='auto' cannot find out how much memory is free on {device}; give memory_budget=")
    return int(_SHARE * free)


def devices_of(modules: Iterable[nn.Module], model_input: Any) -> tuple[torch.device, ...]:
    """Return the devices of the modules' parameters; without parameters, of the input; without tensors, the CPU.

    The meta device is none of them: modules there are not called.

    >>> devices_of([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")], None)
    (device(type='cpu'),)
    """
    module_devices = _real_devices(parameters_in(*modules))
    return module_devices or _real_devices(tensors_of(model_input)) or (torch.device("cpu"),)


def _real_devices(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    return (*dict.fromkeys(x.device for x in tensors if x.device.type != "meta"),)
