"""Read tensors from files of torch.save, with a reader that constructs only plain values and tensors.

Such a file is a zip archive: a pickle with the places of tensors, which is not executed (see `described_pickle`), and
the bytes of each storage, not compressed.
"""

from __future__ import annotations

import errno
import io
import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.files import open_regular
from .._base.settings import shown
from .._base.tensor_file import bytes_of
from .described_pickle import StoredTensor, described
from .rows import overlap

_MOST_BYTES = 16 * 2**20  # of the pickle
_MOST_OF_DIRECTORY = 2 * 2**20  # of the archive's directory, which `zipfile` reads as a whole
_CHUNK = 4 * 2**20
_OF_DAMAGE = (ValueError, zipfile.BadZipFile, struct.error, EOFError, OverflowError, NotImplementedError)


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
        self._file = _BoundedReader(open_regular(path))  # type: ignore[arg-type]  # a raw file
        try:
            with self._naming_the_file():
                if not zipfile.is_zipfile(self._file):
                    raise ValueError("it is no zip archive; save it again with torch 1.6 or later")
                self._file.most = _MOST_OF_DIRECTORY
                self._archive = zipfile.ZipFile(self._file)
                self._file.most = _MOST_BYTES
                self._records = _checked_records(self._archive, self._file)
                pickles = [name for name in self._records if re.fullmatch(r"[^/]*/data\.pkl", name)]
                if len(pickles) != 1:
                    raise ValueError("it holds no data.pkl; torch.save of torch 1.6 and later writes one")
                self._folder = pickles[0].removesuffix("data.pkl")
                self.name = self._folder.removesuffix("/")
                order = f"{self._folder}byteorder"
                if order in self._records and self._archive.read(order) != b"little":
                    raise ValueError("it is not little-endian")
                self.content = described(self._archive.read(pickles[0]))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def rows(self, stored: StoredTensor, rows: slice) -> Tensor:
        """Read rows of a matrix in row-major order; the whole storage is compared with its checksum."""
        storage, name = stored.storage, f"{self._folder}data/{stored.storage.key}"
        record, item = self._records.get(name), storage.dtype.itemsize
        with self._naming_the_file():
            if len(stored.shape) != 2 or stored.stride != (stored.shape[1], 1):
                raise ValueError(f"a tensor of shape {stored.shape} and strides {stored.stride} is no row-major matrix")
            if record is None or record.file_size != storage.count * item:
                raise ValueError(f"{name} is missing, or has not the {storage.count * item} bytes that its pickle says")
            count, width = stored.shape
            assert 0 <= rows.start <= rows.stop <= count
            x = torch.empty(rows.stop - rows.start, width, dtype=storage.dtype, device="cpu")
            memory, first, position = bytes_of(x), (stored.offset + rows.start * width) * item, 0
            with self._archive.open(record) as file:  # which compares the checksum when it has read the last byte
                while chunk := file.read(_CHUNK):
                    shared = overlap(position, len(chunk), first, len(memory))
                    if shared is not None:
                        memory[shared[1]] = chunk[shared[0]]
                    position += len(chunk)
        return x

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Raise ValueError with the file's name for all that is wrong with its bytes."""
        try:
            yield
        except (*_OF_DAMAGE, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that of a place before the beginning
                raise
            raise ValueError(
                f"{self.path} is damaged, or no file of tensors that torch.save has written: "
                f"{str(error) or 'it ends early'}"
            ) from error


class _BoundedReader(io.BufferedReader):
    """A file that refuses to be read into much memory at once, whatever sizes it says that it has."""

    most = _MOST_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self.most:
            raise ValueError(f"a record of {size} bytes where at most {self.most} are expected")
        return super().read(size)


def _checked_records(archive: zipfile.ZipFile, file: io.BufferedReader) -> dict[str, zipfile.ZipInfo]:
    """Return the records of an archive by name, if they lie in its file as torch.save writes them."""
    records, size = archive.infolist(), file.seek(0, io.SEEK_END)
    file.seek(-22, io.SEEK_END)  # where the last record of an archive without a comment begins
    if file.read(4) != b"PK\5\6" or min((record.header_offset for record in records), default=0):
        raise ValueError("it has other bytes before or after the archive")  # which `zipfile` leaves out
    for record in records:
        if record.flag_bits & 1 or record.compress_type or record.compress_size != record.file_size:
            raise ValueError(f"{shown(record.filename)} is compressed or encrypted, which torch.save does not")
        if record.header_offset + record.file_size > size:
            raise ValueError(f"{shown(record.filename)} points behind its end")
    by_name = {record.filename: record for record in records}
    if len(by_name) < len(records):
        raise ValueError("it holds two records of one name")
    return by_name
