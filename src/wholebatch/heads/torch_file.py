"""Read tensors from files of torch.save, with a reader that constructs only plain values and tensors.

Such a file is a zip archive: a pickle with the places of tensors, which is not executed (see `described_pickle`), and
the bytes of each storage, not compressed.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.files import open_regular, read_into, size_of
from .._base.settings import shown
from .._base.tensor_file import bytes_of
from .described_pickle import StoredTensor, described

_MOST_PICKLE_BYTES = 16 * 2**20
_MOST_RECORDS = 100_000
_MOST_DIRECTORY_BYTES = 32 * 2**20
_CHUNK = 4 * 2**20


@dataclass(frozen=True)
class _Record:
    """A file in the archive, with the bytes [start, start + size) of the archive."""

    start: int
    size: int
    crc: int


class TorchFile:
    """An open file of torch.save; a context manager.

    `content` is the saved value, with a `StoredTensor` for each tensor; `name` is the name of the archive, which
    torch.save derives from the file name, without its suffix.

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
                raise self._error("it holds no data.pkl; torch.save of torch 1.6 and later writes one")
            self._folder = pickles[0].removesuffix("data.pkl")
            self.name = self._folder.removesuffix("/")
            order = self._records.get(f"{self._folder}byteorder")
            if order is not None and self._bytes(order, 16) != b"little":
                raise self._error("it is not little-endian")
            try:
                self.content = described(self._bytes(self._records[pickles[0]], _MOST_PICKLE_BYTES))
            except ValueError as error:
                raise self._error(str(error)) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def rows(self, stored: StoredTensor, rows: slice) -> Tensor:
        """Read rows of a matrix in row-major order; the whole storage is compared with its checksum.

        Raises:
            ValueError: if it is no such matrix, or the bytes differ from those written.
        """
        if len(stored.shape) != 2 or stored.stride != (stored.shape[1], 1):
            raise self._error(f"a tensor of shape {stored.shape} and strides {stored.stride} is no row-major matrix")
        storage, (count, width) = stored.storage, stored.shape
        name = f"{self._folder}data/{storage.key}"
        record, item = self._records.get(name), storage.dtype.itemsize
        if record is None or record.size != storage.count * item:
            raise self._error(f"{name} is missing, or has not the {storage.count * item} bytes that its pickle says")
        assert 0 <= rows.start <= rows.stop <= count
        x = torch.empty(rows.stop - rows.start, width, dtype=storage.dtype, device="cpu")
        memory = bytes_of(x)
        first = (stored.offset + rows.start * width) * item
        crc = self._skip(record.start, first, 0)
        self._file.seek(record.start + first)
        if read_into(self._file, memory) < len(memory):
            raise self._error("it ends early")
        crc = zlib.crc32(memory, crc)
        after = first + len(memory)
        if self._skip(record.start + after, record.size - after, crc) != record.crc:
            raise self._error(f"the bytes of {name} are not those written")
        return x

    def _skip(self, start: int, count: int, crc: int) -> int:
        """Return the checksum continued over `count` bytes."""
        chunk = memoryview(bytearray(min(count, _CHUNK)))
        self._file.seek(start)
        while count:
            part = chunk[: min(count, _CHUNK)]
            if read_into(self._file, part) < len(part):
                raise self._error("it ends early")
            crc, count = zlib.crc32(part, crc), count - len(part)
        return crc

    def _bytes(self, record: _Record, most: int) -> bytes:
        if record.size > most:
            raise self._error(f"a record of {record.size} bytes where at most {most} are expected")
        content = self._bytes_at(record.start, record.size)
        if zlib.crc32(content) != record.crc:
            raise self._error("the bytes of a record are not those written")
        return content

    def _bytes_at(self, start: int, count: int) -> bytes:
        if not 0 <= start <= start + count <= size_of(self._file):
            raise self._error("it points behind its end")
        content = bytearray(count)
        self._file.seek(start)
        if read_into(self._file, memoryview(content)) < count:
            raise self._error("it ends early")
        return bytes(content)

    def _read_directory(self) -> dict[str, _Record]:
        """Return the archive's records by name, from the directory at its end."""
        entries, size, start = self._find_directory()
        if entries > _MOST_RECORDS or size > _MOST_DIRECTORY_BYTES:
            raise self._error(f"its directory says that it has {entries} records in {size} bytes")
        text, pos, records = self._bytes_at(start, size), 0, dict[str, _Record]()
        for _ in range(entries):
            if text[pos : pos + 4] != b"PK\1\2" or pos + 46 > len(text):
                raise self._error("its directory is not one")
            flags, method, crc, packed, unpacked, name_size, extra_size, comment_size, offset = struct.unpack(
                "<8x2H4x3I3H8xI", text[pos : pos + 46]
            )
            raw = text[pos + 46 : pos + 46 + name_size]
            extra = text[pos + 46 + name_size : pos + 46 + name_size + extra_size]
            pos += 46 + name_size + extra_size + comment_size
            unpacked, packed, offset = self._widen(extra, [unpacked, packed, offset])
            if flags & 1 or method or packed != unpacked:
                raise self._error(f"{shown(raw)} is compressed or encrypted, which torch.save does not")
            name = raw.decode(errors="replace")
            if name in records:
                raise self._error(f"it holds {shown(name)} twice")
            records[name] = _Record(self._data_of(offset, raw, unpacked, start), unpacked, crc)
        return records

    def _find_directory(self) -> tuple[int, int, int]:
        """Return the number of records, and the directory's size and start."""
        end = size_of(self._file)
        if end < 22 or self._bytes_at(0, 4) != b"PK\3\4":
            raise self._error("it is no zip archive; save it again with torch 1.6 or later")
        last = self._bytes_at(end - 22, 22)
        if last[:4] != b"PK\5\6":
            raise self._error("its end is not that of a zip archive")
        entries, size, start = struct.unpack("<10xH2I2x", last)
        if entries == 0xFFFF or size == 0xFFFFFFFF or start == 0xFFFFFFFF:
            locator = self._bytes_at(end - 42, 20)
            wide = self._bytes_at(struct.unpack("<8xQ4x", locator)[0], 56)
            if locator[:4] != b"PK\6\7" or wide[:4] != b"PK\6\6":
                raise self._error("its end is not that of a zip archive")
            entries, size, start = struct.unpack("<32x3Q", wide)
        return entries, size, start

    def _widen(self, extra: bytes, values: list[int]) -> list[int]:
        """Return sizes and offset, with values above 32 bits read from the field for 64-bit values."""
        pos = 0
        while pos + 4 <= len(extra):
            kind, size = struct.unpack("<2H", extra[pos : pos + 4])
            if kind == 1:
                field = extra[pos + 4 : pos + 4 + size]
                for i, value in enumerate(values):
                    if value == 0xFFFFFFFF and len(field) >= 8:
                        values[i], field = int.from_bytes(field[:8], "little"), field[8:]
            pos += 4 + size
        return values

    def _data_of(self, offset: int, name: bytes, size: int, directory: int) -> int:
        """Return the start of a record's bytes, after a header that repeats its name."""
        header = self._bytes_at(offset, 30)
        name_size, extra_size = struct.unpack("<26x2H", header)
        start = offset + 30 + name_size + extra_size
        if header[:4] != b"PK\3\4" or self._bytes_at(offset + 30, name_size) != name or start + size > directory:
            raise self._error(f"its directory and the header of {shown(name)} differ")
        return start

    def _error(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is damaged, or no file of tensors that torch.save has written: {why}")
