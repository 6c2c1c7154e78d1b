"""Count the bytes that the tensors of a step hold at a time, and the bytes that its operations read and write.

Each operation is watched, on any device. So the figures depend on the program alone, not on the system's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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

    def __init__(self) -> None:
        super().__init__()
        self.most = self.moved = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given, results = _tensors((args, {k: x for k, x in kwargs.items() if k != "out"})), _tensors(found)
        if not _is_view(func) and "empty" not in func._schema.name:
            self.moved += sum(_bytes(x) for x in (*given, *results))
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        earlier = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in results:
            storage = x.untyped_storage()
            if storage._cdata not in earlier and storage._cdata not in self._live:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return found


def _tensors(tree: Any) -> Sequence[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.device.type != "meta"]


def _bytes(x: Tensor) -> int:
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _is_view(func: Any) -> bool:
    """Return whether an operation returns its input's memory and writes nothing into it."""
    schema = func._schema
    writes = any(of.alias_info is not None and of.alias_info.is_write for of in schema.arguments)
    return not writes and any(of.alias_info is not None for of in schema.returns)
