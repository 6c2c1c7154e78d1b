"""The files of the cache: their folder, their locks, and how they are written.

PATHS-FACTS-CHECKSUM.arrow       a table; PATHS is a hash of the paths of its sources, FACTS of their sizes and times
PATHS-COLUMN-STAMP-KEY.ENDING    a result about the pictures of a column
PATHS.lock, PATHS-COLUMN.lock    locks of the processes that write these
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from wholebatch.app import flock

_PARTIAL = ".partial"
_ABANDONED_S = 86400  # without a write


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
