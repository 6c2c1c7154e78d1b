"""Count the bytes that the tensors of a step hold at a time, and the bytes that its operations read and write.

Each operation is watched, on any device. So the figures depend on the program alone, not on the system's allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(NamedTuple):
    """The bytes of a step.

    Args:
        held: the most that its tensors hold at a time, beyond those that were there before it.
        moved: all that its operations read and write.
    """

    held: int
    moved: int


def count_bytes(step: Callable[[], object]) -> Counted:
    """Run a step and return its bytes."""
    with _Count() as count:
        step()
    return Counted(count.most, count.moved)


class _Count(TorchDispatchMode):
    """Follow the memory that operations allocate, until it is freed."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # else torch imports Dynamo at the first operation

    def __init__(self) -> None:
        super().__init__()
        self.most = self.moved = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        inputs: list[Tensor] = []
        results: list[Tensor] = []
        _append(args, inputs)
        _append([x for k, x in kwargs.items() if k != "out"], inputs)
        _append(output, results)
        if _moves(func):
            self.moved += sum(map(_bytes, inputs)) + sum(map(_bytes, results))
        _append(kwargs.get("out"), inputs)
        earlier = {x.untyped_storage()._cdata for x in inputs}
        allocated = False
        for x in results:
            storage = x.untyped_storage()
            # A weak reference keeps the address of a freed storage from being used again.
            if storage._cdata not in earlier and storage._cdata not in self._live:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                allocated = True
        if allocated:  # else there is no more than before
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
            self.most = max(self.most, sum(size for _, size in self._live.values()))
        return output


def _append(tree: Any, tensors: list[Tensor]) -> None:
    """Append the tensors of an operation's arguments or results, which may be in lists."""
    if isinstance(tree, Tensor):
        if tree.device.type != "meta":
            tensors.append(tree)
    elif isinstance(tree, list | tuple):
        for x in tree:
            _append(x, tensors)


def _bytes(x: Tensor) -> int:
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


@cache
def _moves(func: Any) -> bool:
    """Return whether an operation reads or writes memory, not merely returns its input's or allocates some."""
    schema = func._schema
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    is_view = not writes and any(argument.alias_info is not None for argument in schema.returns)
    return not is_view and "empty" not in schema.name
