"""The files of tables in the cache: an Arrow file, and behind it the places of the bytes of its pictures.

A checksum leaves these places out: they may be many bytes, and a damaged picture cannot be decoded. All other bytes are
checked before Arrow interprets any of them, because a damaged Arrow file can end the process that opens it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..tables.plain_types import is_bytes
from ..tables.table import need_pyarrow

_INTEGER, _KIND = 8, "<i8"  # bytes; the places are pairs of an offset and a size, followed by the number of pairs

Batches = Callable[[], Iterator[Any]]
"""Yields record batches, one at least."""
Places = list[tuple[int, int]]
"""Offsets and sizes in a file, in order."""


def write_table(file: Any, batches: Batches) -> None:
    """Write record batches into an open file with a name."""
    pa = need_pyarrow()
    each = batches()
    first = next(each)
    with pa.ipc.new_file(pa.PythonFile(file, mode="w"), first.schema) as writer:
        writer.write_batch(first)
        for batch in each:
            writer.write_batch(batch)
    file.flush()
    places = sorted(_places_of_pictures(_content(Path(file.name))))
    file.write(np.array([*(number for place in places for number in place), len(places)], _KIND).tobytes())


def mapped(path: Path) -> Any:
    """Return the table of a file whose checksum is right; its pages are read when they are needed.

    Raises:
        OSError: it cannot be read.
    """
    pa = need_pyarrow()
    whole = _content(path)
    return pa.ipc.open_file(pa.BufferReader(whole.slice(0, _ends(whole)[0]))).read_all()


def checksum_of(path: Path) -> str:
    """Return a checksum of a file but for the bytes of pictures.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    whole = _content(path)
    _, places = _ends(whole)
    checksum, start = 0, 0
    for offset, size in [*places, (whole.size, 0)]:
        if not start <= offset <= offset + size <= whole.size:
            raise ValueError("its places are not in order")
        checksum = zlib.crc32(whole.slice(start, offset - start), checksum)
        start = offset + size
    return f"{checksum:08x}"


def _content(path: Path) -> Any:
    with need_pyarrow().memory_map(str(path)) as file:
        return file.read_buffer()


def _ends(whole: Any) -> tuple[int, Places]:
    """Return where the Arrow file ends, and the places behind it."""
    start = whole.size - _INTEGER
    count = int(np.frombuffer(whole, _KIND, 1, start)[0]) if start >= 0 else -1
    end = start - 2 * _INTEGER * count
    if count < 0 or end < 0:
        raise ValueError("it has not so many places")
    return end, [(offset, size) for offset, size in np.frombuffer(whole, _KIND, 2 * count, end).reshape(-1, 2).tolist()]


def _places_of_pictures(whole: Any) -> Iterator[tuple[int, int]]:
    """Yield the places of the bytes of pictures, which Arrow calls binary, in an Arrow file."""
    pa = need_pyarrow()
    for column in pa.ipc.open_file(pa.BufferReader(whole)).read_all().columns:
        for chunk in column.chunks:
            for buffer in _bytes_of(chunk):
                if buffer.size:  # an empty one may lie anywhere
                    yield buffer.address - whole.address, buffer.size


def _bytes_of(array: Any) -> Iterator[Any]:
    """Yield the memory that holds the bytes of a binary column, or of one inside of a column."""
    import pyarrow.types as is_type

    kind = array.type
    if is_bytes(kind):
        yield from filter(None, array.buffers()[2:])
    elif is_type.is_struct(kind):
        for place in range(kind.num_fields):
            yield from _bytes_of(array.field(place))
    elif is_type.is_list(kind) or is_type.is_large_list(kind):
        yield from _bytes_of(array.values)
