"""The lock of a run folder, which has one writer. The system releases it when its holder ends, however it ends."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..._base.user_error import UserError
from ..ranks.signals import show
from .record import CONFIG

_flock: Callable[[int, int], None] | None
try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN
    from fcntl import flock as _flock
except ImportError:  # Windows
    _flock = None

FILE = "lock"
PARTIAL_CONFIG = f"{CONFIG}.partial"
_HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class Lock:
    """A lock of a run folder, held from its construction until `close`, or until this process ends.

    The file stays when the lock is released: removing it would let two writers lock two files of the same name. It
    contains the holder's process id and host, for the message to a second writer.

    Args:
        folder: an existing run folder.

    Raises:
        UserError: if another process holds it.
        OSError: if the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.open(path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise UserError(f"{str(path)!r} must be a regular file; remove it")
            self._acquire(folder)
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()} {socket.gethostname()}\n".encode())
        except BaseException:
            self.close()
            raise

    def _acquire(self, folder: Path) -> None:
        if _flock is None:
            show(f"this system has no file locks: nothing keeps a second run out of {folder}")
            return
        try:
            _flock(self._file, LOCK_EX | LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise _writer_error(folder, self._file) from None
            if error.errno not in _NO_LOCKS:
                raise
            show(f"the file system has no locks ({error.strerror}): nothing keeps a second run out of {folder}")

    def close(self) -> None:
        """Release the lock, of the processes as well that were forked from this one and have not ended yet."""
        if self._file >= 0:
            if _flock is not None:
                with suppress(OSError):  # of file systems without locks
                    _flock(self._file, LOCK_UN)
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
    if _flock is None:
        return
    try:
        file = os.open(folder / FILE, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:  # no lock file, so nobody holds it
        return
    try:
        _flock(file, LOCK_SH | LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise _writer_error(folder, file) from None
    finally:
        os.close(file)


def _writer_error(folder: Path, file: int) -> UserError:
    pid, _, host = os.read(file, 300).decode(errors="replace").strip().partition(" ")
    holder = f"process {pid} on {host!r}" if pid.isdecimal() and host else "another process"
    return UserError(
        f"the run folder {str(folder)!r} is written by {holder} at this moment, and a run has one writer; wait until "
        "that process has ended, or end it"
    )
