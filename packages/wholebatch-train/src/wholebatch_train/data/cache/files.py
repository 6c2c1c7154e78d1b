"""The files of the cache: their folder, their locks, their names, and the removal of those that no table needs.

PATHS-FACTS-CHECKSUM.arrow       a table; PATHS is a hash of the paths of its sources, FACTS of their sizes and times
PATHS-COLUMN-STAMP-KEY.ENDING    a result about the pictures of a column, which goes with the table
uncached-PATHS-...               the same of a table that the cache does not hold, such as a folder's
PATHS.lock, PATHS-COLUMN.lock    locks of the processes that write these
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from wholebatch.app import flock

_DIGITS = 24
_OF_TABLE = re.compile(rf"([0-9a-f]{{{_DIGITS}}})[-.]")
_PARTIAL = ".partial"
_BEGUN_S = 60  # after which a process that writes a file holds its lock
_ABANDONED_S = 86400  # without a write, where the file system has no locks


class CannotWriteError(Exception):
    """The cache cannot be written; the sources may be fine."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


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
def written(folder: Path, write: Callable[[Any], None]) -> Iterator[Path]:
    """Write a new file, and yield its path, which is no more afterward unless it was renamed.

    A process that is killed leaves the file; the next one that writes here removes it. The file's lock, which ends with
    its process, tells that nobody writes it any more.

    Raises:
        CannotWriteError: the file cannot be written. Other errors are those of `write`.
    """
    _remove_abandoned(folder)
    try:
        file = tempfile.NamedTemporaryFile(dir=folder, suffix=_PARTIAL, delete=False)  # noqa: SIM115
    except OSError as error:
        raise CannotWriteError(error) from error
    partial = Path(file.name)
    try:
        with file:
            flock(file, "LOCK_EX", "LOCK_NB")
            write(_Sink(file))
            try:
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                raise CannotWriteError(error) from error
            yield partial
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


class _Sink:
    """A file that tells its own errors from those of the sources."""

    def __init__(self, file: Any) -> None:
        self._file, self.name, self.closed = file, file.name, False

    def write(self, content: Any) -> int:
        try:
            return int(self._file.write(content))
        except OSError as error:
            raise CannotWriteError(error) from error

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise CannotWriteError(error) from error

    def close(self) -> None:
        self.closed = True


def _remove_abandoned(folder: Path) -> None:
    """Remove the files of processes that were killed while they wrote."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        with suppress(OSError):  # removed by another process
            age = time.time() - partial.stat().st_mtime
            if age < _BEGUN_S:
                continue
            with partial.open("rb+") as file:
                is_free = flock(file, "LOCK_EX", "LOCK_NB")
            if is_free or (is_free is None and age > _ABANDONED_S):
                partial.unlink()


def hash_of_paths(sources: Sequence[Path]) -> str:
    """Return the hash of paths with which the names of files about these sources begin."""
    return short_hash(repr([str(path.absolute()) for path in sources]), _DIGITS)


def short_hash(text: str, digits: int) -> str:
    """Return the first hexadecimal digits of a hash."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:digits]


def name_beside_table(folder: Path, sources: Sequence[Path]) -> str:
    """Return how the names of results about a table begin."""
    of_paths = hash_of_paths(sources)
    return of_paths if any(folder.glob(f"{of_paths}-*.arrow")) else f"uncached-{of_paths}"


def remove_without_table(folder: Path) -> None:
    """Remove the files that belong to tables which the cache holds no longer. The empty files of locks stay."""
    names = [path.name for path in folder.iterdir()]
    tables = {name[:_DIGITS] for name in names if name.endswith(".arrow")}
    for name in names:
        match = _OF_TABLE.match(name)
        if match and match[1] not in tables and not name.endswith(".lock"):
            remove_file(folder / name)


def remove_file(path: Path) -> None:
    """Remove a file; another process may have removed it, or the folder may be read-only."""
    with suppress(OSError):
        path.unlink()
