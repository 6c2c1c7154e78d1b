"""Read the value that a pickle of torch.save describes, without executing it.

Opcodes are interpreted one by one. The opcodes that torch.save emits for dictionaries, lists, numbers, strings and
tensors give plain values, with a description instead of each tensor. Any other opcode raises ValueError with its name.
"""

from __future__ import annotations

import math
import pickletools
import re
from dataclasses import dataclass
from typing import Any

import torch

from .._base.settings import shown

_STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
_CALLED = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_MOST_OPCODES = 2_000_000


@dataclass(frozen=True)
class _Name:
    """The name of a class or function in a pickle; nothing is imported."""

    text: str


@dataclass(frozen=True)
class Storage:
    """A storage, which several tensors may share: a record of the archive."""

    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: its storage, first element, shape and strides."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def described(text: bytes) -> Any:
    """Return the value that a pickle describes; raise ValueError for a pickle that does more."""
    machine = _Machine()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(text)):
        if count >= _MOST_OPCODES:
            raise ValueError(f"its pickle has more than {_MOST_OPCODES} opcodes")
        if opcode.name == "STOP":
            break
        machine.take(opcode.name, argument)
    return machine.result()


class _Machine:
    """The stack of a pickle. It imports, calls and constructs nothing that the pickle names."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under a mark
        self._memo: dict[int, Any] = {}

    def take(self, name: str, argument: Any) -> None:
        """Interpret one opcode."""
        match name:
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                self._stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                self._stack.append(_CONSTANTS[name])
            case "EMPTY_DICT":
                self._stack.append({})
            case "EMPTY_LIST":
                self._stack.append([])
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self._top()
            case "BINGET" | "LONG_BINGET":
                if argument not in self._memo:
                    raise ValueError("its pickle reads a memo entry that it has not stored")
                self._stack.append(self._memo[argument])
            case "MARK":
                self._below.append(self._stack)
                self._stack = []
            case "TUPLE":
                values = self._pop_to_mark()
                self._stack.append(tuple(values))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                values = [self._pop() for _ in range(int(name[-1]))]
                self._stack.append(tuple(reversed(values)))
            case "APPEND":
                self._append([self._pop()])
            case "APPENDS":
                self._append(self._pop_to_mark())
            case "SETITEM":
                value, key = self._pop(), self._pop()
                self._set([key, value])
            case "SETITEMS":
                self._set(self._pop_to_mark())
            case "BUILD":  # the attributes of an OrderedDict, which are not needed
                self._pop()
                if type(self._top()) is not dict:
                    raise ValueError("its pickle sets the state of an object")
            case "GLOBAL":
                self._stack.append(_name(argument))
            case "BINPERSID":
                self._stack.append(_storage(self._pop()))
            case "REDUCE":
                arguments, called = self._pop(), self._pop()
                self._stack.append(_result_of(called, arguments))
            case "PROTO":
                pass
            case _:
                raise ValueError(f"its pickle has the opcode {name}, which is refused")

    def result(self) -> Any:
        if len(self._stack) != 1 or self._below:
            raise ValueError("its pickle does not end with one value")
        return self._stack[0]

    def _top(self) -> Any:
        if not self._stack:
            raise ValueError("its pickle reads from an empty stack")
        return self._stack[-1]

    def _pop(self) -> Any:
        value = self._top()
        self._stack.pop()
        return value

    def _pop_to_mark(self) -> list[Any]:
        """Remove and return all values since the last mark."""
        if not self._below:
            raise ValueError("its pickle has no mark where one is needed")
        values, self._stack = self._stack, self._below.pop()
        return values

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise ValueError("its pickle appends to a value that is no list")
        target.extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict or len(values) % 2:
            raise ValueError("its pickle sets items of a value that is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):
                raise ValueError(f"its pickle has a key of type {type(key).__name__}; expected strings or integers")
            target[key] = value


def _name(text: str) -> _Name:
    if text not in _STORAGES and text not in _CALLED:
        raise ValueError(f"its pickle names {shown(text.replace(' ', '.'))}, which is refused; nothing was executed")
    return _Name(text)


def _storage(reference: object) -> Storage:
    """Return the storage that a persistent id refers to."""
    match reference:
        case ("storage", _Name(text=kind), str(key), str(), int(count)) if kind in _STORAGES and count >= 0:
            if not re.fullmatch(r"\d{1,9}", key):
                raise ValueError(f"its pickle names a storage {shown(key)}")
            return Storage(key, _STORAGES[kind], count)
    raise ValueError("its pickle refers to something that is no storage")


def _result_of(called: object, arguments: object) -> Any:
    """Return the value, or the tensor's description, that stands for the result of a call."""
    if not isinstance(called, _Name):
        raise ValueError("its pickle calls a value that is no function")
    match called.text, arguments:
        case "collections OrderedDict", ():
            return {}
        case "torch._utils _rebuild_parameter", (StoredTensor() as data, bool(), dict()):
            return data
        case "torch._utils _rebuild_tensor_v2", (
            Storage() as storage, offset, tuple(shape), tuple(stride), bool(), dict(), *_,
        ):  # fmt: skip
            return _tensor(storage, offset, shape, stride)
    raise ValueError(f"its pickle calls {called.text} with arguments that torch.save does not write")


def _tensor(storage: Storage, offset: object, shape: tuple[object, ...], stride: tuple[object, ...]) -> StoredTensor:
    numbers = [offset, *shape, *stride]
    if len(shape) != len(stride) or len(shape) > 16 or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ValueError("its pickle describes a tensor with an invalid shape")
    tensor = StoredTensor(storage, offset, shape, stride)  # type: ignore[arg-type]
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    if math.prod(tensor.shape) and last >= storage.count:
        raise ValueError("its pickle describes a tensor that reaches beyond its storage")
    return tensor
