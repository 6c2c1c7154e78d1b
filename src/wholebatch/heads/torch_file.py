"""Tensors out of files of torch.save, by a reader that constructs nothing but plain values and tensors.

Such a file is a zip archive: a pickle that says where tensors lie, and the bytes of each storage, not compressed. The
pickle is not executed. Its opcodes are looked at one by one, and those that torch.save emits for dictionaries, lists,
numbers, strings and tensors give a description; anything else is refused by its name.
"""

from __future__ import annotations

import math
import pickletools
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._files import open_regular, read_into, size_of
from .._settings import shown
from .._tensor_file import bytes_of

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
_ORDERED_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_NAMES = {*_STORAGES, _ORDERED_DICT, _TENSOR, _PARAMETER}
_MOST_PICKLE_BYTES = 16 * 2**20
_MOST_OPCODES = 2_000_000
_MOST_RECORDS = 100_000
_MOST_DIRECTORY_BYTES = 32 * 2**20
_CHUNK = 4 * 2**20


@dataclass(frozen=True)
class _Name:
    """A class or function that a pickle names; nothing is imported."""

    text: str


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: of which storage, from which element on, in which shape."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Record:
    """A file in the archive: its bytes are [start, start + size) of the archive's."""

    start: int
    size: int
    crc: int


class TorchFile:
    """An open file of torch.save; a context manager.

    `content` is what was saved, with a `StoredTensor` in the place of each tensor; `name` is the archive's, which
    torch.save takes from the file's, without its suffix.

    Raises:
        ValueError: with the file's name, if it is damaged or holds anything but plain values and tensors.
        OSError: if it cannot be opened or read.
    """

    content: Any
    name: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)
        try:
            self._records = self._read_directory()
            pickles = [name for name in self._records if re.fullmatch(r"[^/]*/data\.pkl", name)]
            if len(pickles) != 1:
                raise self._wrong("it holds no data.pkl; torch.save of torch 1.6 and later writes one")
            self._folder = pickles[0].removesuffix("data.pkl")
            self.name = self._folder.removesuffix("/")
            order = self._records.get(f"{self._folder}byteorder")
            if order is not None and self._bytes(order, 16) != b"little":
                raise self._wrong("it is not little-endian")
            try:
                self.content = _described(self._bytes(self._records[pickles[0]], _MOST_PICKLE_BYTES))
            except ValueError as error:
                raise self._wrong(str(error)) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def rows(self, stored: StoredTensor, rows: slice) -> Tensor:
        """Read some rows of a matrix in row-major order; the whole storage is compared with its checksum.

        Raises:
            ValueError: if it is no such matrix, or the bytes are not those that were written.
        """
        if len(stored.shape) != 2 or stored.stride != (stored.shape[1], 1):
            raise self._wrong(f"a tensor of shape {stored.shape} and strides {stored.stride} is no row-major matrix")
        storage, (count, width) = stored.storage, stored.shape
        name = f"{self._folder}data/{storage.key}"
        record, item = self._records.get(name), storage.dtype.itemsize
        if record is None or record.size != storage.count * item:
            raise self._wrong(f"{name} is missing, or has not the {storage.count * item} bytes that its pickle says")
        assert 0 <= rows.start <= rows.stop <= count
        x = torch.empty(rows.stop - rows.start, width, dtype=storage.dtype, device="cpu")
        memory = bytes_of(x)
        first = (stored.offset + rows.start * width) * item
        crc = self._skip(record.start, first, 0)
        self._file.seek(record.start + first)
        if read_into(self._file, memory) < len(memory):
            raise self._wrong("it ends early")
        crc = zlib.crc32(memory, crc)
        after = first + len(memory)
        if self._skip(record.start + after, record.size - after, crc) != record.crc:
            raise self._wrong(f"the bytes of {name} are not those written")
        return x

    def _skip(self, start: int, count: int, crc: int) -> int:
        """The checksum that goes on over so many bytes."""
        chunk = memoryview(bytearray(min(count, _CHUNK)))
        self._file.seek(start)
        while count:
            part = chunk[: min(count, _CHUNK)]
            if read_into(self._file, part) < len(part):
                raise self._wrong("it ends early")
            crc, count = zlib.crc32(part, crc), count - len(part)
        return crc

    def _bytes(self, record: _Record, most: int) -> bytes:
        if record.size > most:
            raise self._wrong(f"a record of {record.size} bytes where at most {most} are expected")
        found = self._at(record.start, record.size)
        if zlib.crc32(found) != record.crc:
            raise self._wrong("the bytes of a record are not those written")
        return found

    def _at(self, start: int, count: int) -> bytes:
        if not 0 <= start <= start + count <= size_of(self._file):
            raise self._wrong("it points behind its end")
        found = bytearray(count)
        self._file.seek(start)
        if read_into(self._file, memoryview(found)) < count:
            raise self._wrong("it ends early")
        return bytes(found)

    def _read_directory(self) -> dict[str, _Record]:
        """The archive's records by name, from the directory at its end."""
        entries, size, start = self._find_directory()
        if entries > _MOST_RECORDS or size > _MOST_DIRECTORY_BYTES:
            raise self._wrong(f"its directory says that it has {entries} records in {size} bytes")
        text, at, found = self._at(start, size), 0, dict[str, _Record]()
        for _ in range(entries):
            if text[at : at + 4] != b"PK\1\2" or at + 46 > len(text):
                raise self._wrong("its directory is not one")
            flags, method, crc, packed, unpacked, of_name, of_extra, of_comment, offset = struct.unpack(
                "<8x2H4x3I3H8xI", text[at : at + 46]
            )
            raw = text[at + 46 : at + 46 + of_name]
            extra = text[at + 46 + of_name : at + 46 + of_name + of_extra]
            at += 46 + of_name + of_extra + of_comment
            unpacked, packed, offset = self._wide(extra, [unpacked, packed, offset])
            if flags & 1 or method or packed != unpacked:
                raise self._wrong(f"{shown(raw)} is compressed or encrypted, which torch.save does not")
            name = raw.decode(errors="replace")
            if name in found:
                raise self._wrong(f"it holds {shown(name)} twice")
            found[name] = _Record(self._data_of(offset, raw, unpacked, start), unpacked, crc)
        return found

    def _find_directory(self) -> tuple[int, int, int]:
        """How many records, and the directory's size and place."""
        end = size_of(self._file)
        if end < 22 or self._at(0, 4) != b"PK\3\4":
            raise self._wrong("it is no zip archive; save it again with torch 1.6 or later")
        last = self._at(end - 22, 22)
        if last[:4] != b"PK\5\6":
            raise self._wrong("its end is not that of a zip archive")
        entries, size, start = struct.unpack("<10xH2I2x", last)
        if entries == 0xFFFF or size == 0xFFFFFFFF or start == 0xFFFFFFFF:
            locator = self._at(end - 42, 20)
            wide = self._at(struct.unpack("<8xQ4x", locator)[0], 56)
            if locator[:4] != b"PK\6\7" or wide[:4] != b"PK\6\6":
                raise self._wrong("its end is not that of a zip archive")
            entries, size, start = struct.unpack("<32x3Q", wide)
        return entries, size, start

    def _wide(self, extra: bytes, values: list[int]) -> list[int]:
        """Sizes and place, those that have no room in 32 bits from the field for such."""
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack("<2H", extra[at : at + 4])
            if kind == 1:
                given = extra[at + 4 : at + 4 + size]
                for i, value in enumerate(values):
                    if value == 0xFFFFFFFF and len(given) >= 8:
                        values[i], given = int.from_bytes(given[:8], "little"), given[8:]
            at += 4 + size
        return values

    def _data_of(self, offset: int, name: bytes, size: int, directory: int) -> int:
        """Where a record's bytes begin, behind a header that has its name once more."""
        header = self._at(offset, 30)
        of_name, of_extra = struct.unpack("<26x2H", header)
        start = offset + 30 + of_name + of_extra
        if header[:4] != b"PK\3\4" or self._at(offset + 30, of_name) != name or start + size > directory:
            raise self._wrong(f"its directory and the header of {shown(name)} differ")
        return start

    def _wrong(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is damaged, or no file of tensors that torch.save has written: {why}")


def _described(text: bytes) -> Any:
    """What a pickle describes; ValueError for what is more than a description."""
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
        """One opcode."""
        if name in _VALUES:
            self._stack.append(_VALUES[name](argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                raise ValueError("its pickle recalls what it has not stored")
            self._stack.append(self._memo[argument])
        elif name == "MARK":
            self._below.append(self._stack)
            self._stack = []
        elif name in _OPERATIONS:
            _OPERATIONS[name](self)
        elif name != "PROTO":
            raise ValueError(f"its pickle has the opcode {name}, which is refused")

    def result(self) -> Any:
        if len(self._stack) != 1 or self._below:
            raise ValueError("its pickle does not end with one value")
        return self._stack[0]

    def _top(self) -> Any:
        if not self._stack:
            raise ValueError("its pickle takes what is not there")
        return self._stack[-1]

    def _pop(self) -> Any:
        value = self._top()
        self._stack.pop()
        return value

    def _marked(self) -> list[Any]:
        """All since the last mark."""
        if not self._below:
            raise ValueError("its pickle has no mark where one is needed")
        found, self._stack = self._stack, self._below.pop()
        return found

    def _append(self, values: list[Any]) -> None:
        into = self._top()
        if type(into) is not list:
            raise ValueError("its pickle appends to what is no list")
        into.extend(values)

    def _set(self, values: list[Any]) -> None:
        into = self._top()
        if type(into) is not dict or len(values) % 2:
            raise ValueError("its pickle sets items of what is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):
                raise ValueError(f"its pickle has a key of type {type(key).__name__}; expected strings or integers")
            into[key] = value

    def append(self) -> None:
        self._append([self._pop()])

    def appends(self) -> None:
        self._append(self._marked())

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self._marked())

    def tuple_of(self, count: int | None) -> None:
        values = self._marked() if count is None else [self._pop() for _ in range(count)][::-1]
        self._stack.append(tuple(values))

    def build(self) -> None:
        """Attributes of an OrderedDict, which are not needed."""
        self._pop()
        if type(self._top()) is not dict:
            raise ValueError("its pickle sets the state of an object")

    def persistent(self) -> None:
        match self._pop():
            case ("storage", _Name(text=kind), str(key), str(), int(count)) if kind in _STORAGES and count >= 0:
                if not re.fullmatch(r"\d{1,9}", key):
                    raise ValueError(f"its pickle names a storage {shown(key)}")
                self._stack.append(_Storage(key, _STORAGES[kind], count))
            case _:
                raise ValueError("its pickle refers to something that is no storage")

    def reduce(self) -> None:
        arguments, called = self._pop(), self._pop()
        match called, arguments:
            case _Name(text=name), () if name == _ORDERED_DICT:
                self._stack.append({})
            case _Name(text=name), (StoredTensor() as data, bool(), dict()) if name == _PARAMETER:
                self._stack.append(data)
            case _Name(text=name), (_Storage() as storage, offset, tuple(shape), tuple(stride), bool(), dict(), *_) if (
                name == _TENSOR
            ):
                self._stack.append(_stored(storage, offset, shape, stride))
            case _Name(text=name), _:
                raise ValueError(f"its pickle calls {name} with arguments that torch.save does not write")
            case _:
                raise ValueError("its pickle calls what is no function")


def _stored(storage: _Storage, offset: object, shape: tuple[object, ...], stride: tuple[object, ...]) -> StoredTensor:
    numbers = [offset, *shape, *stride]
    if len(shape) != len(stride) or len(shape) > 16 or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ValueError("its pickle describes a tensor with a shape that is none")
    found = StoredTensor(storage, offset, shape, stride)  # type: ignore[arg-type]
    last = found.offset + sum((n - 1) * step for n, step in zip(found.shape, found.stride, strict=True))
    if math.prod(found.shape) and last >= storage.count:
        raise ValueError("its pickle describes a tensor that reaches beyond its storage")
    return found


def _name(argument: str) -> _Name:
    if argument not in _NAMES:
        raise ValueError(
            f"its pickle names {shown(argument.replace(' ', '.'))}, which is refused; nothing was executed"
        )
    return _Name(argument)


def _same(argument: Any) -> Any:
    return argument


_VALUES: dict[str, Callable[[Any], Any]] = {
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "BINUNICODE": _same,
    "BININT": _same,
    "BININT1": _same,
    "BININT2": _same,
    "LONG1": _same,
    "BINFLOAT": _same,
    "GLOBAL": _name,
}
_OPERATIONS: dict[str, Callable[[_Machine], None]] = {
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "TUPLE": lambda machine: machine.tuple_of(None),
    "TUPLE1": lambda machine: machine.tuple_of(1),
    "TUPLE2": lambda machine: machine.tuple_of(2),
    "TUPLE3": lambda machine: machine.tuple_of(3),
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
    "REDUCE": _Machine.reduce,
}
