"""Signals: SIGTERM and SIGINT stop a run after its step, SIGUSR1 asks for a checkpoint.

A signal can come at any time, and to any rank. It is noted at once, by a thread, because the main thread may be inside
an operation that takes long or waits for another rank. All ranks then agree at the end of their step on what to do.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

STOP = (signal.SIGTERM, signal.SIGINT)
CHECKPOINT: int | None = getattr(signal, "SIGUSR1", None)  # Windows has none
# GNU timeout sends SIGTERM to its child and then to the whole process group: an echo is not a second signal.
_ECHO_S = 0.3
FINISHING = "{}: the run ends after this step, with a checkpoint; a second signal ends it at once"


class Stopped(Exception):  # noqa: N818  not an error
    """A signal has ended the run.

    Args:
        signum: the signal.
        message: a line that is still to be shown; empty where it has been.
    """

    def __init__(self, signum: int, message: str = "") -> None:
        super().__init__(signum, message)
        self.signum, self.message = signum, message


class Asked(NamedTuple):
    """What signals have asked for on any rank."""

    stop: int
    """The signal that stops the run, or 0."""
    checkpoint: bool


class Inbox:
    """A socket in which the signals of this process arrive as bytes, at the moment that they are delivered."""

    def __init__(self) -> None:
        self.socket, self._write = socket.socketpair()
        for end in (self.socket, self._write):
            end.setblocking(False)
        self._before = {number: signal.signal(number, _noted) for number in _all()}
        for number in self._before:
            if hasattr(signal, "siginterrupt"):
                signal.siginterrupt(number, False)  # system calls in other libraries' threads go on
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def read(self) -> list[int]:
        """The signals since the last call."""
        try:
            return [number for number in self.socket.recv(4096) if number in self._before]
        except BlockingIOError:
            return []

    def wake(self) -> None:
        """Make the socket readable."""
        with contextlib.suppress(BlockingIOError):
            self._write.send(b"\0")

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
        self.socket.close()
        self._write.close()


class Patience:
    """Tells a second request to stop from an echo of the first."""

    def __init__(self) -> None:
        self._first: float | None = None

    def is_second(self) -> bool:
        """Called at each request."""
        if self._first is None:
            self._first = time.monotonic()
        return time.monotonic() - self._first > _ECHO_S


class Requests:
    """What this rank has been asked for by signals, its own and those of the process that has started it.

    Args:
        launcher: the line to the process that has started this one, which sends the signals that it gets, and hears
            when training begins. When that process is gone, this one ends.
        announce: whether this process tells the user that it has understood a signal.
    """

    def __init__(self, launcher: Connection | None = None, *, announce: bool = True) -> None:
        self._launcher, self._announce = launcher, announce
        self._stop, self._checkpoint = 0, False
        self._patience = Patience()
        self._closed = False
        self.device = torch.device("cpu")
        """Where ranks communicate."""
        self.folder: Path | None = None
        """The run folder, once there is one."""
        self.training = False
        """Whether steps are made, so that there is something to finish and to save."""
        # Python tells its main thread alone of signals.
        self._inbox = Inbox() if threading.current_thread() is threading.main_thread() else None
        self._thread = threading.Thread(target=self._listen, name="wholebatch-signals", daemon=True)
        self._thread.start()
        if launcher is not None and hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _all())  # see `signals_blocked`

    def begin(self) -> None:
        """From now on a request to stop waits for the end of the step."""
        self.training = True
        if self._stop:  # it came while this was set
            self._end_at_once(self._stop, "before the first step")
        if self._launcher is not None:
            with contextlib.suppress(OSError):
                self._launcher.send("training")

    def agree(self) -> Asked:
        """What has been asked for on any rank since the last call. All ranks, at the same step."""
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
        """Listen no more."""
        self._closed = True
        if self._inbox is not None:
            self._inbox.wake()
            self._thread.join()
            self._inbox.close()

    def _listen(self) -> None:
        sources: list[Connection | socket.socket] = []
        if self._inbox is not None:
            sources.append(self._inbox.socket)
        if self._launcher is not None:
            sources.append(self._launcher)
        while sources:
            ready = wait(sources)
            if self._closed:
                return
            if self._launcher is not None and self._launcher in ready:
                try:
                    self._note(self._launcher.recv())
                except (EOFError, OSError):
                    os._exit(1)  # whoever has started this rank is gone; a run ends as a whole
            if self._inbox is not None and self._inbox.socket in ready:
                for number in self._inbox.read():
                    second = number in STOP and self._patience.is_second()
                    if second:
                        self._end_at_once(number, "at once")
                    self._note(number)

    def _note(self, number: int) -> None:
        if number == CHECKPOINT:
            self._checkpoint = True
        elif not self._stop:
            self._stop = number
            if not self.training:
                self._end_at_once(number, "before the first step")
            if self._announce:
                say(FINISHING.format(name(number)))

    def _end_at_once(self, number: int, when: str) -> NoReturn:
        try:
            if self._announce:
                say(f"{name(number)}: ended {when}{how_to_resume(self.folder)}")
                show_cursor()
        finally:
            os._exit(128 + number)


@contextlib.contextmanager
def inbox() -> Iterator[Inbox | None]:
    """The signals of this process, while it waits for others; None in a thread, which gets no signals."""
    box = Inbox() if threading.current_thread() is threading.main_thread() else None
    try:
        yield box
    finally:
        if box is not None:
            box.close()


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Signals to a process that is started in here wait until it makes its `Requests`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _all())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_by(signum: int) -> NoReturn:
    """End this process by the signal, so that its parent sees by which: a shell shows 128 + signum."""
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # the first process of a container does not die of its own signal


def say(line: str) -> None:
    """A line about the run on stderr."""
    print(f"wholebatch train: {line}", file=sys.stderr, flush=True)


def show_cursor() -> None:
    """After a progress bar that had no time to do so."""
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")


def name(number: int) -> str:
    """SIGTERM for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_to_resume(folder: Path | None, otherwise: str = "") -> str:
    """The end of a message: how to go on with the run in the folder, if there is one."""
    if folder is None or not (folder / "config.json").exists():
        return otherwise
    return f"; go on with: {resume_command(folder)}"


def resume_command(folder: Path) -> str:
    """The command that goes on with the run in `folder`, from anywhere: as this program was started."""
    command = f"train --resume {shlex.quote(str(folder.absolute()))}"
    python, called = shlex.quote(sys.executable), Path(sys.argv[0])
    if {"TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        size = os.environ["LOCAL_WORLD_SIZE"]
        if os.environ["WORLD_SIZE"] != size:
            return f"torchrun as before on each machine, with -m wholebatch {command}"
        return f"{python} -m torch.distributed.run --standalone --nproc-per-node {size} -m wholebatch {command}"
    if called.parts[-2:] == ("wholebatch", "__main__.py"):
        return f"{python} -m wholebatch {command}"
    if called.name == "wholebatch" and not _is_found(called):
        return f"{shlex.quote(str(called.absolute()))} {command}"
    return f"wholebatch {command}"


def _is_found(program: Path) -> bool:
    """Whether a shell finds this program by its name: its environment is activated."""
    found = shutil.which(program.name)
    return found is not None and Path(found).resolve() == program.resolve()


def _all() -> list[int]:
    return [*STOP, *([] if CHECKPOINT is None else [CHECKPOINT])]


def _noted(signum: int, frame: FrameType | None) -> None:
    """Does nothing: that there is a handler makes Python write the signal to the socket."""
