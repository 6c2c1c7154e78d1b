"""The files of the cache: their folder, a lock for each, and the names under which they are written."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ...._base.files import flock

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
