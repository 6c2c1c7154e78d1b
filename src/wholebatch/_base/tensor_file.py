"""Tensors in a file, in the layout of safetensors, written and read with torch alone; a digest covers every byte.

    8 bytes: n, little-endian | n bytes: a header, JSON | the tensors' bytes, one after the other

The header holds each tensor's dtype, shape and place, and in its metadata the SHA-256 of each tensor's bytes and of the
header itself. So a tensor that is read alone is verified alone. Reading constructs tensors and executes nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch
from torch import Tensor

from .bounded_json import DIGEST, ZEROS, check_digest, is_digest, parse_json, with_digest
from .files import open_regular, read_into, replacing, size_of
from .settings import shown

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_MOST_HEADER_BYTES = 32 * 2**20
_MOST_DIMS = 16
_SAVE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its bytes are [start, stop) of all tensors' bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str


def new_save_id() -> str:
    """Return an id for all parts of one save: 32 random hexadecimal digits. No generator of torch is used."""
    return secrets.token_hex(16)


def is_save_id(value: object) -> TypeGuard[str]:
    """Whether value has the form of such an id."""
    return isinstance(value, str) and _SAVE.fullmatch(value) is not None


def bytes_of(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU; the tensor must outlive the result."""
    assert x.is_contiguous()
    assert x.device.type == "cpu"
    if not x.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * (x.numel() * x.element_size())).from_address(x.data_ptr())).cast("B")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], values: Iterable[Tensor] | None = None
) -> dict[str, str]:
    """Write a file beside `path`, rename it over `path`, and return the digest of each tensor's bytes.

    Where `tensors` are on the device "meta", and have no data, `values` are the same tensors with data, in their order.

    Raises:
        ValueError: a dtype that the layout does not have.
        OSError: the file cannot be written; `path` is unchanged.
    """
    _check_byte_order()
    for name, x in tensors.items():
        if x.dtype not in _NAMES:
            raise ValueError(f"{name} has dtype {x.dtype}; expected one of {', '.join(map(str, _NAMES))}: cast it")
    digests = dict.fromkeys(tensors, ZEROS)
    with replacing(path) as file:
        file.write(_header(tensors, metadata, digests))
        for name, x in zip(tensors, tensors.values() if values is None else values, strict=True):
            on_host = x.detach().to("cpu").contiguous()
            memory = bytes_of(on_host)
            digests[name] = hashlib.sha256(memory).hexdigest()
            file.write(memory)
        file.seek(0)
        file.write(_header(tensors, metadata, digests))
    return digests


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], digests: Mapping[str, str]) -> bytes:
    """Return the header, preceded by its length, which does not depend on the digests."""
    tensor_digests = {_digest_key(name): digest for name, digest in digests.items()}
    header: dict[str, Any] = {_METADATA: {DIGEST: ZEROS, **metadata, **tensor_digests}}
    start = 0
    for name, x in tensors.items():
        stop = start + x.numel() * x.element_size()
        header[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + with_digest(text)


def _digest_key(name: str) -> str:
    """Return the key of a tensor's digest in the metadata."""
    return f"{DIGEST} {name}"


class TensorFile:
    """An open file that `write_tensors` has written; a context manager.

    Raises:
        ValueError: no regular file, or not the file that was written; the message has its name.
        OSError: the file cannot be opened or read.
    """

    metadata: dict[str, str]
    entries: dict[str, Entry]

    def __init__(self, path: Path) -> None:
        _check_byte_order()
        self.path = path
        self._file = open_regular(path)
        try:
            self._first, header = self._read_header()
            self.metadata, self.entries = _checked_header(header, size_of(self._file) - self._first, str(path))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, name: str) -> Tensor:
        """Read a tensor, and check that its bytes are those that were written.

        Raises:
            ValueError: other bytes, or no tensor of that name.
            OSError: the file cannot be read.
        """
        if name not in self.entries:
            raise ValueError(f"{self.path} has no tensor {name!r}; it is not the file that was written")
        entry = self.entries[name]
        x = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        memory = bytes_of(x)
        self._file.seek(self._first + entry.start)
        is_complete = read_into(self._file, memory) == len(memory)
        if not is_complete or hashlib.sha256(memory).hexdigest() != entry.digest:
            raise ValueError(f"{self.path} is damaged or incomplete: the bytes of {name!r} are not those written")
        if entry.dtype is torch.bool and x.numel() and x.view(torch.uint8).max() > 1:
            raise ValueError(f"{self.path} is damaged: {name!r} has dtype bool, and holds more than 0 and 1")
        return x

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        source = str(self.path)
        size = int.from_bytes(_read_exactly(self._file, 8, source), "little")
        if size > min(_MOST_HEADER_BYTES, size_of(self._file) - 8):
            raise ValueError(f"{source} is damaged or incomplete: its header claims to have {size} bytes")
        text = _read_exactly(self._file, size, source)
        header = parse_json(text, source) if text[:1] == b"{" else None
        metadata = header.get(_METADATA) if isinstance(header, dict) else None
        if not isinstance(header, dict) or not isinstance(metadata, dict):
            raise ValueError(f"{source} is damaged, or no file of tensors that this program has written")
        check_digest(text, metadata.get(DIGEST), source)
        return 8 + size, header


def _read_exactly(file: BinaryIO, count: int, source: str) -> bytes:
    buffer = bytearray(count)
    if read_into(file, memoryview(buffer)) < count:
        raise ValueError(f"{source} is damaged or incomplete: it ends within its header")
    return bytes(buffer)


def _checked_header(header: dict[str, Any], data_bytes: int, source: str) -> tuple[dict[str, str], dict[str, Entry]]:
    """Check a header, and return its metadata and entries."""
    metadata = header.pop(_METADATA)
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{source} is damaged: its metadata are not all strings")
    entries = {name: _entry(name, value, metadata, source) for name, value in header.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(f"{source} is damaged: the bytes of {shown(name)} begin at {entry.start}, expected {end}")
        end = entry.stop
    if end != data_bytes:
        raise ValueError(f"{source} is damaged or incomplete: its tensors take {end} bytes, it has {data_bytes}")
    return {key: value for key, value in metadata.items() if key.partition(" ")[0] != DIGEST}, entries


def _entry(name: str, value: Any, metadata: dict[str, str], source: str) -> Entry:
    wrong = ValueError(f"{source} is damaged: it describes {shown(name)} as {shown(value)}")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(value["dtype"], str) or value["dtype"] not in _DTYPES or not _are_counts(shape, _MOST_DIMS):
        raise wrong
    dtype = _DTYPES[value["dtype"]]
    if not _are_counts(offsets, 2) or len(offsets) != 2:
        raise wrong
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0] or math.prod(filter(None, shape)) >= 2**62:
        raise wrong
    digest = metadata.get(_digest_key(name))
    if not is_digest(digest):
        raise ValueError(f"{source} has no digest of {shown(name)}; it is damaged, or was not written by this program")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1], digest)


def _are_counts(values: object, most: int) -> bool:
    """Whether values is a list of at most `most` integers, each >= 0 and of less than 63 bits."""
    if not isinstance(values, list) or len(values) > most:
        return False
    return all(type(value) is int and 0 <= value < 2**62 for value in values)


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise ValueError("files of tensors are little-endian, and this machine is not: use a little-endian machine")
