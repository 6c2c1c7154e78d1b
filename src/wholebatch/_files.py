"""Files that are looked at before they are read, and files that are replaced in one step."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading: no link, folder, pipe or device.

    Raises:
        ValueError: if it is something else.
        OSError: if there is none, or it cannot be opened.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a link; expected the file itself, so put the file in its place")
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no regular file; expected the file that was written")
    return os.fdopen(descriptor, "rb", buffering=0)


def size_of(file: BinaryIO) -> int:
    """The size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Read a whole file that has at most so many bytes.

    Raises:
        ValueError: if it has more, or is no regular file.
        OSError: if it cannot be read.
    """
    with open_regular(path) as file:
        size = size_of(file)
        if size > most_bytes:
            raise ValueError(
                f"{path} has {size} bytes; expected at most {most_bytes}, so it is damaged or another file"
            )
        found = bytearray(size)
        return bytes(found[: read_into(file, memoryview(found))])


def read_into(file: BinaryIO, memory: memoryview) -> int:
    """Fill the memory from an unbuffered file; returns the number of bytes, which is smaller at the file's end."""
    done = 0
    while done < len(memory) and (count := file.readinto(memory[done:])):  # type: ignore[attr-defined]
        done += count
    return done


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path`, renamed over it at the end: whoever is killed leaves the old one or the new one whole.

    Raises:
        OSError: if it cannot be written; `path` is as it was.
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
    """Make what has been written to a file last beyond a loss of power; no file is none to sync."""
    if path.exists():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename last beyond a loss of power, where folders can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
