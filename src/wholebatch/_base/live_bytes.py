"""Follow the memory that the tensors of a step hold, and the bytes that its operations read and write.

Each operation is watched, on any device. So the figures depend on the program alone, not on the system's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def bytes_held(step: Callable[[], object]) -> int:
    """Run a step and return the most bytes that its tensors hold at a time, beyond those that were there before it."""
    with LiveBytes() as live:
        step()
    return live.most


class LiveBytes(TorchDispatchMode):
    """Follow the memory that operations allocate, until it is freed.

    Attributes:
        held: bytes that were allocated here and are not freed.
        most: the most that they were.
    """

    _should_skip_dynamo = classmethod(lambda cls: False)  # else torch imports Dynamo at the first operation

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def allocated(self, size: int) -> None:
        """Take note of new memory."""
        self.held += size
        self.most = max(self.most, self.held)

    def freed(self, size: int) -> None:
        """Take note of memory that is no longer there; it may have been freed some operations before."""
        self.held -= size

    def operated(self, func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Take note of an operation that reads or writes memory."""

    def notice_freed(self) -> None:
        """Call `freed` for memory that is no longer there."""
        for key in [key for key, (storage, _) in self._live.items() if storage.expired()]:
            self.freed(self._live.pop(key)[1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        inputs: list[Tensor] = []
        results: list[Tensor] = []
        _append(args, inputs)
        _append([x for k, x in kwargs.items() if k != "out"], inputs)
        _append(output, results)
        if _moves(func):
            self.operated(func, inputs, results)
        _append(kwargs.get("out"), inputs)
        if func is torch.ops.aten.clone.default and args[0].layout == torch.sparse_coo:
            for x in inputs:  # under a dispatch mode, autograd stores a copy of a sparse gradient instead of itself
                self.freed(self._live.pop(x.untyped_storage()._cdata, (None, 0))[1])
        earlier = {x.untyped_storage()._cdata for x in inputs}
        # A weak reference keeps the address of a freed storage from being used again.
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in results}
        new = {key: storage for key, storage in storages.items() if key not in earlier and key not in self._live}
        if new:
            self.notice_freed()
        for key, storage in new.items():
            self._live[key] = StorageWeakRef(storage), storage.nbytes()
            self.allocated(storage.nbytes())
        return output


def _append(tree: Any, tensors: list[Tensor]) -> None:
    """Append the tensors of an operation's arguments or results, which may be in lists."""
    if isinstance(tree, Tensor):
        if tree.layout == torch.sparse_coo:
            tensors += tree._indices(), tree._values()
        elif tree.device.type != "meta":
            tensors.append(tree)
    elif isinstance(tree, list | tuple):
        for x in tree:
            _append(x, tensors)


@cache
def _moves(func: Any) -> bool:
    """Return whether an operation reads or writes memory, not merely returns its input's or allocates some."""
    schema = func._schema
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    is_view = not writes and any(argument.alias_info is not None for argument in schema.returns)
    return not is_view and "empty" not in schema.name
