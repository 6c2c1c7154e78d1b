"""The lock of a run folder, which has one writer. The system releases it when its holder ends, however it ends."""

from __future__ import annotations

import os
import shlex
import socket
import stat
from pathlib import Path

from wholebatch.app import UserError, flock

from ..ranks.signals import show
from .record import CONFIG

FILE = "lock"
PARTIAL_CONFIG = f"{CONFIG}.partial"


class Lock:
    """A lock of a run folder, held from its construction until `close`, or until this process ends.

    The file stays when the lock is released: removing it would let two writers lock two files of the same name. It
    contains the holder's process id and host, for the message to a second writer, which is a UserError.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.open(path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise UserError(f"{str(path)!r} must be a regular file; remove it")
            is_free = flock(self._file, "LOCK_EX", "LOCK_NB")
            if is_free is False:
                raise _writer_error(folder, self._file)
            if is_free is None:
                show(f"there are no file locks here: nothing keeps a second run out of {folder}")
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()} {socket.gethostname()}\n".encode())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock, of the processes as well that were forked from this one and have not ended yet."""
        if self._file >= 0:
            flock(self._file, "LOCK_UN")
            os.close(self._file)
            self._file = -1


def check_is_free(folder: Path) -> None:
    """Raise UserError unless `folder` is empty, or has only the files of a run killed before it had a configuration."""
    if not {entry.name for entry in folder.iterdir()} - {FILE, PARTIAL_CONFIG}:
        return
    if not (folder / CONFIG).exists():
        raise UserError(f"--run-folder: {str(folder)!r} is not empty and no run; choose another folder")
    _check_has_no_writer(folder)
    raise UserError(
        f"--run-folder: {str(folder)!r} is not empty; resume its run with --resume {shlex.quote(str(folder))}, or "
        "choose another folder"
    )


def _check_has_no_writer(folder: Path) -> None:
    """Raise UserError if another process holds the folder's lock; write nothing and hold nothing."""
    try:
        file = os.open(folder / FILE, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:  # no lock file, so nobody holds it
        return
    try:
        if flock(file, "LOCK_SH", "LOCK_NB") is False:
            raise _writer_error(folder, file)
    finally:
        os.close(file)


def _writer_error(folder: Path, file: int) -> UserError:
    pid, _, host = os.read(file, 300).decode(errors="replace").strip().partition(" ")
    holder = f"process {pid} on {host!r}" if pid.isdecimal() and host else "another process"
    return UserError(
        f"the run folder {str(folder)!r} is written by {holder} at this moment, and a run has one writer; wait until "
        "that process has ended, or end it"
    )
