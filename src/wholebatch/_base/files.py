"""Files that are checked before they are read, and files that are replaced in one step."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .user_error import UserError

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading: no link, folder, pipe or device.

    Raises:
        ValueError: no regular file.
        OSError: no file at all, or one that cannot be opened.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a link; expected the file itself: replace the link by the file")
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file; expected the file that was written")
    return os.fdopen(descriptor, "rb", buffering=0)


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Read a whole file of at most so many bytes.

    Raises:
        ValueError: more bytes, or no regular file.
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        size = size_of(file)
        if size > most_bytes:
            raise ValueError(f"{path} has {size} bytes; expected at most {most_bytes}: it is damaged, or another file")
        buffer = bytearray(size)
        return bytes(buffer[: read_into(file, memoryview(buffer))])


def read_into(file: BinaryIO, memory: memoryview) -> int:
    """Fill the memory from an unbuffered file, and return the number of bytes, which is smaller at the file's end."""
    done = 0
    while done < len(memory) and (count := file.readinto(memory[done:])):  # type: ignore[attr-defined]
        done += count
    return done


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file beside `path`, and rename it over `path` at the end.

    A process that is killed leaves either the old or the new file, complete.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # of a process that was killed
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make the contents of a file survive a loss of power, if the file exists."""
    if path.exists():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a loss of power, where folders can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def flock(file: Any, *operations: str) -> bool | None:
    """Lock an open file, until it is closed, by operations of the module fcntl such as "LOCK_EX" and "LOCK_NB".

    Returns:
        Whether that is done: False where another process holds the lock, None where there are no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, sum(getattr(fcntl, operation) for operation in operations))
    except OSError as error:  # others: a file system without locks
        return False if error.errno in _HELD else None
    return True


@contextmanager
def writing(label: str) -> Iterator[None]:
    """Turn an error of writing `label` into a mistake of the user's, such as a full disk."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{label} cannot be written: {error.strerror or error}") from error
