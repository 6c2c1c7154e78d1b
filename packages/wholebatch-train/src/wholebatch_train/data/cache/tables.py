"""The cache of tables: what is slow to read is written once as an Arrow file, which all ranks of a machine map.

The name of a file holds the path, time and size of its sources, so that a changed source is read again, and a checksum
of its own content but for the bytes of pictures: a file that a full disk or a loss of power has cut short is written
again, and a start takes as long with large pictures as with small ones. All bytes but those of pictures are checked
before Arrow interprets any of them, because a damaged Arrow file can end the process that opens it; the places of the
bytes of pictures, which cannot be decoded if they are damaged, stand behind the Arrow file.

PATHS-FACTS-CHECKSUM.arrow       a table; PATHS is a hash of the paths of its sources, FACTS of their sizes and times
PATHS-COLUMN-STAMP-KEY.ENDING    a result about the pictures of a column
PATHS.lock, PATHS-COLUMN.lock    locks of the processes that write these
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from wholebatch.app import UserError, amount, flock

from ..tables.columns import is_bytes
from ..tables.table import need_pyarrow

_VERSION = 6  # of the cached files
_MOST_BYTES = 2**30  # of sources whose table is kept in memory where the cache cannot be written
_PARTIAL = ".partial"
_ABANDONED_S = 86400  # without a write
_INTEGER, _KIND = 8, "<i8"  # bytes; the places are pairs of an offset and a size, followed by the number of pairs
Batches = Callable[[], Iterator[Any]]
"""Yields record batches, one at least."""
Places = list[tuple[int, int]]
"""Offsets and sizes in a file, in order."""


def cached(
    sources: list[Path], batches: Batches, before_writing: Callable[[Path], None] = lambda _: None
) -> tuple[Any, tuple[str, ...]]:
    """Return the Arrow table of the record batches, and lines about it; from the cache if no source has changed.

    Of several processes that start at the same time, one reads the sources and the others wait.

    Args:
        sources: the files that the batches are read from.
        batches: yields them, one at least. Of a source that cannot be read it raises no OSError: that is the cache's.
        before_writing: called with the folder of the cache if the sources are to be read, before they are.
    """
    states = [path.stat() for path in sources]
    of_paths = hash_of_paths(sources)
    name = f"{of_paths}-{short_hash(repr((_VERSION, [(x.st_mtime_ns, x.st_size) for x in states])), 16)}"
    try:
        folder = cache_folder()
        if (table := _find(folder, name)) is not None:  # without the lock, on which ranks would wait for each other
            return table, ()
        before_writing(folder)
        with alone(folder / f"{of_paths}.lock"):
            if (table := _find(folder, name)) is not None:
                return table, ()
            with new_file(folder) as file:
                write_table(file, batches)
                file.flush()
                os.fsync(file.fileno())
                partial = Path(file.name)
                whole = partial.replace(folder / f"{name}-{checksum_of(partial)}.arrow")
            for old in folder.glob(f"{of_paths}-*.arrow"):  # of earlier versions of the sources, or damaged
                if old != whole:  # without locks another process may have written it as well
                    remove_file(old)
        return mapped(whole), ()
    except OSError as error:
        return _read_into_memory(batches, sum(x.st_size for x in states), error)


def _find(folder: Path, name: str) -> Any | None:
    """Return the table of a cached file whose checksum is that of its name; None if there is none."""
    for file in folder.glob(f"{name}-*.arrow"):
        try:
            if checksum_of(file) == file.stem.rpartition("-")[2]:
                return mapped(file)
        except (OSError, ValueError):  # removed by another process, or damaged: it is written again
            continue
    return None


def _read_into_memory(batches: Batches, size: int, error: OSError) -> tuple[Any, tuple[str, ...]]:
    where = "the cache (wholebatch/tables in $XDG_CACHE_HOME, or in ~/.cache)"
    reason = error.strerror or str(error)
    if size > _MOST_BYTES:
        raise UserError(
            f"{where} cannot be written: {reason}; set XDG_CACHE_HOME to a folder with about {amount(size)} of space"
        ) from error
    table = need_pyarrow().Table.from_batches(list(batches()))
    return table, (f"the table is in the memory of each rank: {where} cannot be written ({reason})",)


def cache_folder() -> Path:
    """Return the folder of tables that have been read: wholebatch/tables in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        OSError: it cannot be made.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # no home
        raise OSError(None, str(error)) from error
    folder = home / "wholebatch" / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in here with this path; where there are no locks, do not wait."""
    with ExitStack() as held:
        with suppress(OSError):  # a folder that cannot be written, which its writer says
            flock(held.enter_context(path.open("wb")), "LOCK_EX")
        yield


@contextmanager
def new_file(folder: Path) -> Iterator[Any]:
    """Open a new file with a name, which is removed at the end unless it was renamed.

    A process that is killed leaves it; one that writes here a day later removes it.

    Raises:
        OSError: the file cannot be written.
    """
    for partial in folder.glob(f"*{_PARTIAL}"):
        with suppress(OSError):  # removed by another process
            if time.time() - partial.stat().st_mtime > _ABANDONED_S:
                partial.unlink()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=_PARTIAL, delete=False) as file:
        try:
            yield file
        finally:
            remove_file(Path(file.name))


def hash_of_paths(sources: Sequence[Path]) -> str:
    """Return the hash of paths with which the names of files about these sources begin."""
    return short_hash(repr([str(path.absolute()) for path in sources]), 24)


def short_hash(text: str, digits: int) -> str:
    """Return the first hexadecimal digits of a hash."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:digits]


def remove_file(path: Path) -> None:
    """Remove a file; another process may have removed it, or the folder may be read-only."""
    with suppress(OSError):
        path.unlink()


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
