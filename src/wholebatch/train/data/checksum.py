"""Arrow files of the cache, and a checksum of all that a table has but the bytes of its pictures."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .table import need_pyarrow

_END = 10  # bytes at the end of an Arrow file: the length of its footer, and ARROW1

Batches = Callable[[], Iterator[Any]]
"""Yields record batches, one at least."""


def write_batches(file: Any, batches: Batches) -> None:
    """Write record batches as an Arrow file."""
    pa = need_pyarrow()
    each = batches()
    first = next(each)
    with pa.ipc.new_file(pa.PythonFile(file, mode="w"), first.schema) as writer:
        writer.write_batch(first)
        for batch in each:
            writer.write_batch(batch)


def mapped(file: Path) -> Any:
    """Return the table of an Arrow file, whose pages are read when they are needed.

    Raises:
        OSError, ValueError, pyarrow.ArrowException: it cannot be read.
    """
    pa = need_pyarrow()
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def checksum_of(path: Path) -> str:
    """Return a checksum of an Arrow file's size, its schema, the places of its columns, and their values.

    The bytes of pictures, which Arrow calls binary, do not count, only their places: they may be many, and a damaged
    picture cannot be decoded.

    Raises:
        OSError, ValueError, pyarrow.ArrowException: it cannot be read.
    """
    pa = need_pyarrow()
    with pa.memory_map(str(path)) as file:
        whole = file.read_buffer()
    found = zlib.crc32(str(whole.size).encode(), zlib.crc32(_footer(whole)))
    for column in pa.ipc.open_file(pa.BufferReader(whole)).read_all().columns:
        for chunk in column.chunks:
            for buffer, counts in _buffers(chunk):
                if buffer.size:  # an empty one may lie anywhere
                    place = f"{buffer.address - whole.address} {buffer.size}"
                    found = zlib.crc32(buffer if counts else b"", zlib.crc32(place.encode(), found))
    return f"{found:08x}"


def _footer(whole: Any) -> Any:
    """Return the end of an Arrow file: its schema, and where its record batches lie."""
    size = int.from_bytes(whole.slice(max(0, whole.size - _END)).to_pybytes()[:4], "little", signed=True)
    if not 0 < size <= whole.size - _END:
        raise ValueError("no Arrow file")
    return whole.slice(whole.size - _END - size)


def _buffers(array: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the memory of a column, and whether its content counts."""
    import pyarrow.types as is_type

    kind, buffers = array.type, array.buffers()
    parts: list[Any] = []
    own = len(buffers)
    if is_type.is_struct(kind):
        own, parts = 1, [array.field(place) for place in range(kind.num_fields)]
    elif is_type.is_list(kind) or is_type.is_large_list(kind):
        own, parts = 2, [array.values]
    is_picture = is_type.is_binary(kind) or is_type.is_large_binary(kind) or is_type.is_binary_view(kind)
    for place, buffer in enumerate(buffers[:own]):
        if buffer is not None:
            yield buffer, not (is_picture and place > 1)
    for part in parts:
        yield from _buffers(part)
