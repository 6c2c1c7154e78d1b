"""The cache of tables: what is slow to read is written once as an Arrow file, which all ranks of a machine map.

The name of a file holds the path, time and size of its sources, so that a changed source is read again, and a checksum
of its own content: a file that a full disk or a loss of power has cut short is written again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..._user_error import UserError
from .table import need_pyarrow

_VERSION = 2  # of the cached files
_PART = 2**24  # bytes that are read at a time
_MOST_BYTES = 2**30  # of sources whose table is kept in memory where the cache cannot be written

Batches = Callable[[], Iterator[Any]]
"""Yields record batches, one at least."""


def cached(sources: list[Path], batches: Batches) -> tuple[Any, tuple[str, ...]]:
    """Return the Arrow table of the record batches, and lines about it; from the cache if no source has changed.

    Of several processes that start at the same time, one reads the sources and the others wait.

    Raises:
        UserError: a large table, and the cache cannot be written.
    """
    facts = [(path.stat().st_mtime_ns, path.stat().st_size) for path in sources]
    of_paths = hashlib.sha256(repr([str(path.absolute()) for path in sources]).encode()).hexdigest()[:24]
    of_facts = hashlib.sha256(repr((_VERSION, facts)).encode()).hexdigest()[:16]
    try:
        folder = cache_folder()
    except OSError as error:
        return _in_memory(batches, sum(size for _, size in facts), error)
    with _alone(folder / f"{of_paths}.lock"):
        pattern = f"{of_paths}-{of_facts}-*.arrow"
        for file in folder.glob(pattern):
            if (found := _mapped_if_whole(file)) is not None:
                return found, ()
        try:
            partial, checksum = _write(batches, folder)
        except _CannotWriteError as error:
            return _in_memory(batches, sum(size for _, size in facts), error.reason)
        for old in folder.glob(f"{of_paths}-*.arrow"):  # of earlier versions of the sources
            with suppress(OSError):
                old.unlink()
        file = partial.replace(folder / f"{of_paths}-{of_facts}-{checksum:08x}.arrow")
        return _mapped(file), ()


def uncached(batches: Batches) -> tuple[Any, tuple[str, ...]]:
    """Return the Arrow table of the record batches, mapped from a file that has no name any more."""
    try:
        partial, _ = _write(batches, cache_folder())
    except _CannotWriteError as error:
        return _in_memory(batches, 0, error.reason)
    except OSError as error:
        return _in_memory(batches, 0, error)
    try:
        return _mapped(partial), ()  # the mapping outlives the file's name
    finally:
        partial.unlink()


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


class _CannotWriteError(Exception):
    """The cache cannot be written; the sources may be fine."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


class _Sink:
    """A file that tells its own errors from those of the sources, and computes the checksum of what it writes."""

    def __init__(self, file: Any) -> None:
        self._file, self.checksum, self.closed = file, 0, False

    def write(self, content: Any) -> int:
        self.checksum = zlib.crc32(content, self.checksum)
        try:
            return int(self._file.write(content))
        except OSError as error:
            raise _CannotWriteError(error) from error

    def flush(self) -> None:
        """The file is flushed at the end."""

    def close(self) -> None:
        self.closed = True


def _write(batches: Batches, folder: Path) -> tuple[Path, int]:
    """Write a new file; return its path and its checksum."""
    pa = need_pyarrow()
    try:
        file = tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False)  # noqa: SIM115
    except OSError as error:
        raise _CannotWriteError(error) from error
    partial = Path(file.name)
    try:
        with file:
            sink = _Sink(file)
            each = batches()
            first = next(each)
            with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), first.schema) as writer:
                writer.write_batch(first)
                for batch in each:
                    writer.write_batch(batch)
            try:
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                raise _CannotWriteError(error) from error
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return partial, sink.checksum


def _mapped(file: Path) -> Any:
    pa = need_pyarrow()
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def _mapped_if_whole(file: Path) -> Any | None:
    """Return the table of a cached file, or None if its content has not the checksum of its name."""
    checksum = 0
    try:
        with file.open("rb") as content:
            while part := content.read(_PART):
                checksum = zlib.crc32(part, checksum)
        return _mapped(file) if f"{checksum:08x}" == file.stem.rpartition("-")[2] else None
    except OSError:  # removed by another process, or not readable: it is written again
        return None


def _in_memory(batches: Batches, size: int, error: OSError) -> tuple[Any, tuple[str, ...]]:
    where = "the cache (wholebatch/tables in $XDG_CACHE_HOME, or in ~/.cache)"
    reason = error.strerror or str(error)
    if size > _MOST_BYTES:
        raise UserError(
            f"{where} cannot be written: {reason}; set XDG_CACHE_HOME to a folder with about {size / 2**30:.1f} GiB of "
            "space"
        ) from error
    table = need_pyarrow().Table.from_batches(list(batches()))
    return table, (f"the table is in the memory of each rank: {where} cannot be written ({reason})",)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in here with this path; where there are no locks, do not wait."""
    with ExitStack() as held:
        try:
            from fcntl import LOCK_EX, flock

            file = held.enter_context(path.open("wb"))
            flock(file, LOCK_EX)
        except (ImportError, OSError):  # Windows; a file system without locks: several processes write equal files
            pass
        yield
