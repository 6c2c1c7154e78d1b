"""The batch of each step, prepared ahead by worker processes.

What a step needs is a function of the step alone, so workers hold no state: after a resume, on any number of ranks and
with any number of workers, they begin at the present step.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from wholebatch.app import UserError, cpus_of_a_rank

from .sides import Chosen, FilePictures, Side

_B = TypeVar("_B")
_MOST_WORKERS = 8  # more seldom help, and each holds batches in shared memory
_NOTICED_S = 1.0  # until the exit of a process whose connection has broken is noticed, at most
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
# A fork shares the table's pages and the imports with its rank, and starts in milliseconds. Python 3.14 does not fork
# by default. Elsewhere than on Linux a fork is not safe, and workers are new programs.
_CONTEXT = "fork" if sys.platform == "linux" else None


class Feed(Generic[_B]):
    """Batches by their step, in any order; in ascending order they are prepared ahead."""

    def __init__(self, prepare: Callable[[int], _B], *, stop: int, workers: int) -> None:
        self._prepare, self._stop, self._workers = prepare, stop, workers
        self._ahead: Iterator[Any] | None = None
        self._next = 0

    def at(self, step: int) -> _B:
        """Return the batch of a step."""
        if not self._workers:
            return self._prepare(step)
        if self._ahead is None or step != self._next:
            self.close()
            self._ahead, self._next = prepared(self._prepare, range(step, self._stop), workers=self._workers), step
        self._next += 1
        batch: _B = next(self._ahead)
        if self._next == self._stop:
            self.close()
        return batch

    def close(self) -> None:
        self._ahead = None


def workers_of_a_rank(workers: int, sides: Iterable[Side], size: int) -> int:
    """Return how many processes prepare a rank's batches: `--workers`; -1: for pictures its share of the cores."""
    if workers >= 0:
        return workers
    if not any(isinstance(side, (FilePictures, Chosen)) for side in sides):
        return 0
    return min(_MOST_WORKERS, cpus_of_a_rank(int(os.environ.get("LOCAL_WORLD_SIZE", size))))


def prepared(
    prepare: Callable[[Any], _B], keys: range | list[Any], *, workers: int, context: str | None = _CONTEXT
) -> Iterator[_B]:
    """Yield prepare(key) for each key, in order, from so many worker processes, which start as `context` says."""
    if not workers:
        yield from map(prepare, keys)
        return
    loader = DataLoader(
        _Prepared(prepare, keys),
        batch_size=None,
        num_workers=workers,
        worker_init_fn=_begin_worker,
        collate_fn=_identity,
        multiprocessing_context=context,
    )
    batches, processes = _start_workers(loader)

    def end() -> None:
        nonlocal batches
        batches = iter(())  # which ends the workers and waits for them

    # At its exit Python would send them SIGTERM, which they leave to the rank, and wait for them.
    atexit.register(end)
    try:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
                if str(error).startswith("Caught ") or not (how := _cause_of_death(processes)):
                    raise
                raise WorkerDiedError(how) from error
            if isinstance(batch, UserError):
                raise batch
            yield batch
    finally:
        atexit.unregister(end)
        end()


class WorkerDiedError(Exception):
    """A worker has died; the message says how, in words that follow "a process that reads the data"."""


def _start_workers(loader: DataLoader[Any]) -> tuple[Iterator[Any], list[Any]]:
    """Start the workers; return their batches, and their processes."""
    others = multiprocessing.active_children()
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    with warnings.catch_warnings():
        # Since 3.12 Python warns of every fork beside threads. These only wait: for signals, and inside of libraries.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)  # JAX's
        batches = iter(loader)
    if handler is not None and threading.current_thread() is threading.main_thread():
        # torch's handler would raise an error wherever the program is when a worker dies: in the middle of a
        # checkpoint, or where nobody sees it. Without it the next batch that does not come is the error.
        signal.signal(signal.SIGCHLD, handler)
    return batches, [each for each in multiprocessing.active_children() if each not in others]


def _cause_of_death(processes: list[Any]) -> str:
    """Return how one of these processes has died; "" if none has."""
    deadline = time.monotonic() + _NOTICED_S
    while not (codes := [each.exitcode for each in processes if each.exitcode]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not codes:
        return ""
    if -codes[0] == getattr(signal, "SIGBUS", None):
        return (
            "had too little shared memory; enlarge /dev/shm (docker run --shm-size 8g), or use --workers 0, which "
            "needs none"
        )
    how = f"was killed by {signal.Signals(-codes[0]).name}" if codes[0] < 0 else f"ended with exit code {codes[0]}"
    return f"{how} (was the machine out of memory? fewer --workers need less)"


class _Prepared(Dataset[Any]):
    """Its workers are sent indices of keys: a key that is a tensor would come by a connection that can break."""

    def __init__(self, prepare: Callable[[Any], Any], keys: range | list[Any]) -> None:
        self._prepare, self._keys = prepare, keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._prepare(self._keys[index])
        except UserError as error:
            return error  # raised in a worker, it would come back as a traceback in a message


def _identity(batch: Any) -> Any:
    return batch


def _begin_worker(_: int) -> None:
    """Leave signals to the rank, which ends its workers; a terminal sends Ctrl-C to all of them.

    On Linux a worker dies with its rank, at once: it holds the rank's open pipes, by which others see the rank's end.
    """
    for each in (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])):
        signal.signal(each, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # a fork has that of its rank
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    sys.excepthook = _show_thread_error
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    torch.set_num_threads(1)


def _show_thread_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error of a thread, unless it is that the rank, to which the thread sends batches, is gone."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
