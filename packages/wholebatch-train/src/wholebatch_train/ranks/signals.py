"""Signals: SIGTERM and SIGINT stop a run after its step, SIGUSR1 requests a checkpoint.

A signal can come at any time, and to any rank. A thread records it at once, because the main thread may be inside a
long operation or waiting for another rank. At the end of a step the ranks combine their requests and act alike.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    import torch

STOP = (signal.SIGTERM, signal.SIGINT)
CHECKPOINT: int | None = getattr(signal, "SIGUSR1", None)  # Windows has none
# GNU timeout sends SIGTERM to its child and then to the whole process group: an echo is not a second signal.
_ECHO_S = 0.3
FINISHING = "{}: the run completes this step or its report and ends, with a checkpoint; a second signal ends it at once"


class Stopped(Exception):  # noqa: N818  not an error
    """A signal has ended the run."""

    def __init__(self, signum: int, message: str = "") -> None:
        super().__init__(signum, message)
        self.signum, self.message = signum, message


class Asked(NamedTuple):
    """The requests of signals on any rank."""

    stop: int
    """The signal that stops the run, or 0."""
    checkpoint: bool


class Inbox:
    """A socket that receives the signals of this process as bytes, at the moment of their delivery.

    Python delivers signals to its main thread only: one that is made in another thread receives none.
    """

    def __init__(self) -> None:
        self.socket, self._write = socket.socketpair()
        for end in (self.socket, self._write):
            end.setblocking(False)
        is_main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, _ignore) for number in (_signals() if is_main else ())}
        for number in self._before:
            if hasattr(signal, "siginterrupt"):
                signal.siginterrupt(number, False)  # keeps system calls in other libraries' threads
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False) if is_main else None

    def read(self) -> list[int]:
        """Return the signals since the last call."""
        try:
            return [number for number in self.socket.recv(4096) if number in self._before]
        except BlockingIOError:
            return []

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._write.send(b"\0")

    def close(self) -> None:
        """Restore the earlier handlers."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python
        self.socket.close()
        self._write.close()


class Patience:
    """Distinguishes a second request to stop from an echo of the first."""

    def __init__(self) -> None:
        self._first: float | None = None

    def is_second(self) -> bool:
        """Return whether this request, the latest, comes later than an echo of the first."""
        if self._first is None:
            self._first = time.monotonic()
        return time.monotonic() - self._first > _ECHO_S


class Requests:
    """Requests by signals to this rank and to the process that has started it.

    Args:
        launcher: the connection to the process that has started this one. It sends the signals that it gets, and is
            informed when training begins. When that process is gone, this one ends.
        announce: whether this process confirms a signal to the user.
    """

    def __init__(self, launcher: Connection | None = None, *, announce: bool = True) -> None:
        self._launcher, self._announce = launcher, announce
        self._stop, self._checkpoint = 0, False
        self._patience = Patience()
        self._closed = False
        self.device: torch.device | None = None
        """The device of the all-reduce. None: the CPU."""
        self.how_to_resume = ""
        """The end of a message, once there is a run folder."""
        self.training = False
        """Whether steps are made, so that there is something to complete and to save."""
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._listen, name="wholebatch-signals", daemon=True)
        self._thread.start()
        if launcher is not None and hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals())  # see `signals_blocked`

    def begin(self) -> None:
        """Start training: from now on a request to stop waits for the end of the step."""
        self.training = True
        if self._stop:  # it came during the line above
            self._end_at_once(self._stop, "before the first step")
        if self._launcher is not None:
            with contextlib.suppress(OSError):
                self._launcher.send("training")

    def combined(self) -> Asked:
        """Return the requests to any rank since the last call. All ranks, at the same step."""
        import torch
        import torch.distributed as dist

        asked = Asked(self._stop, self._checkpoint)
        if dist.is_initialized():
            flags = torch.tensor([asked.stop, asked.checkpoint], dtype=torch.int32, device=self.device)
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            stop, checkpoint = flags.tolist()
            asked = Asked(stop, bool(checkpoint))
        if asked.checkpoint:
            self._checkpoint = False
        return asked

    def close(self) -> None:
        """Stop listening, and restore the earlier handlers."""
        self._closed = True
        self._inbox.wake()
        self._thread.join()
        self._inbox.close()

    def _listen(self) -> None:
        sources: list[Connection | socket.socket] = [
            self._inbox.socket,
            *([] if self._launcher is None else [self._launcher]),
        ]
        while True:
            ready = wait(sources)
            if self._closed:
                return
            if self._launcher is not None and self._launcher in ready:
                try:
                    self._record(self._launcher.recv())
                except (EOFError, OSError):
                    os._exit(1)  # the process that has started this rank is gone; a run ends as a whole
            for number in self._inbox.read():
                if number in STOP and self._patience.is_second():
                    self._end_at_once(number, "at once")
                self._record(number)

    def _record(self, number: int) -> None:
        if number == CHECKPOINT:
            self._checkpoint = True
        elif not self._stop:
            self._stop = number
            if not self.training:
                self._end_at_once(number, "before the first step")
            if self._announce:
                show(FINISHING.format(name(number)))

    def _end_at_once(self, number: int, when: str) -> NoReturn:
        try:
            if self._announce:
                show(f"{name(number)}: ended {when}{self.how_to_resume}")
        finally:
            os._exit(128 + number)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Make signals to a process that is started in this context wait until it creates its `Requests`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_by(signum: int) -> NoReturn:
    """End this process by the signal, which its parent then sees: a shell shows 128 + signum."""
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # its own signal does not end the first process of a container


def show(line: str) -> None:
    """Print a line about the run on stderr."""
    print(f"wholebatch train: {line}", file=sys.stderr, flush=True)


def name(number: int) -> str:
    """Return the name of a signal: SIGTERM for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _signals() -> list[int]:
    return [*STOP, *([] if CHECKPOINT is None else [CHECKPOINT])]


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing: with any handler, Python writes the signal to the socket."""
