"""Run a function on W real processes, without ports or a launcher; a hang ends with an error.

Each rank is a separate process; its gloo process group meets in a file. The processes are forked from a server that has
already imported torch, so a call costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from .._base.settings import check_callable, check_instance, check_integer, check_positive_number, shown
from .rank_process import GRACE_S, STACK_SIGNAL, run_rank, stack_file, to_cpu

_T = TypeVar("_T")
_PRELOADED = "WHOLEBATCH_PRELOAD"  # `wholebatch._launch.preload` reads it
_MOST_SECONDS = 1e9
_MOST_RANKS = 1024  # processes of one call


class RankError(RuntimeError):
    """A rank raised, died or did not finish; the message has every rank's traceback or stack."""


class RankTimeoutError(RankError, TimeoutError):
    """Some rank did not finish in time."""


def run_ranks(
    fn: Callable[..., _T],
    world_size: int,
    *args: Any,  # of whatever types fn takes
    backend: str = "gloo",
    timeout_s: float = 60,
) -> list[_T]:
    """Call `fn(*args)` on `world_size` ranks of a new default process group and return each rank's result.

    Inside `fn`, `torch.distributed` is initialized: `dist.get_rank()` is this rank's number. Each rank has
    one thread, this process's import path and warning filters, and the environment variables of the time of the first
    call. It may start processes, as a `DataLoader` with workers does; those that still run when `fn` returns, fails or
    is late are ended. With `world_size=1` the call happens in this process.

    Args:
        fn: the function. It travels to other processes, so it must be importable (defined at the top level of a
            module); where `cloudpickle` is installed, lambdas and local functions work too.
        world_size: number of ranks, W >= 1.
        args: arguments of `fn`, the same for all ranks.
        backend: of the process group; "gloo" runs anywhere.
        timeout_s: seconds for the whole call and for every collective in it; does not bound W = 1.

    Returns:
        [fn's result on rank 0, 1, ..., W - 1]; tensors come back detached, on the CPU.

    Raises:
        RankError: if a rank raises or dies, with every rank's traceback. Ranks that are left waiting for it are ended.
        RankTimeoutError: if a rank has not finished after `timeout_s`, with each such rank's stack.
        ValueError: if `world_size < 1`, if `fn` cannot travel, or if W = 1 inside an existing process group.

    >>> import torch.distributed as dist
    >>> run_ranks(dist.get_world_size, 1)
    [1]
    """
    check_callable("fn", fn)
    check_integer("world_size", world_size, minimum=1, maximum=_MOST_RANKS, detail="ranks on this machine")
    _check_backend(backend)
    if check_positive_number("timeout_s", timeout_s, "it is how long the call may take, in seconds") > _MOST_SECONDS:
        raise ValueError(f"timeout_s must be at most {_MOST_SECONDS:g} seconds, got {timeout_s}")
    if world_size == 1:
        return [_run_in_process(fn, args, backend)]
    return run_processes(fn, world_size, *args, backend=backend, timeout_s=timeout_s)


def _check_backend(backend: object) -> None:
    """Check that this torch has the backend, or each of several, as in "cpu:gloo,cuda:nccl"."""
    names = backend.split(",") if isinstance(backend, str) else []
    if not names or not all(dist.is_backend_available(name.rpartition(":")[2].strip().lower()) for name in names):
        raise ValueError(f"backend must be one that this torch has, such as 'gloo' or 'nccl'; got {shown(backend)}")


def preload(*modules: str) -> None:
    """Import these modules once, before the first call of :func:`run_ranks`, instead of once on each rank.

    They must not compute anything when they are imported.
    """
    for name in modules:
        check_instance("modules", name, str, "names of modules, as in an import")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"modules must be names of modules, as in an import; got {shown(name)}")
    before = os.environ.get(_PRELOADED, "").split(",")
    os.environ[_PRELOADED] = ",".join(dict.fromkeys(name for name in (*before, *modules) if name))


def start_server() -> None:
    """Start the server of rank processes now, so that it imports torch before the first rank is needed."""
    if _context().get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def run_processes(
    fn: Callable[..., _T], world_size: int, *args: Any, backend: str = "gloo", timeout_s: float = 60
) -> list[_T]:
    """Call `fn(*args)` like :func:`run_ranks`, but in a separate process for one rank, too."""
    with contextlib.closing(RankProcesses(world_size, backend=backend, timeout_s=timeout_s)) as processes:
        return processes.call(fn, *args)


class RankProcesses:
    """The processes of W ranks, which stay in one process group from call to call; close them after the last one."""

    def __init__(self, world_size: int, *, backend: str = "gloo", timeout_s: float) -> None:
        self._world_size, self._backend, self._timeout_s = world_size, backend, timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # while the processes run
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def call(self, fn: Callable[..., _T], *args: Any) -> list[_T]:
        """Call `fn(*args)` on each rank, as :func:`run_ranks` does; after a failure the next call has new processes."""
        call = pickled((fn, args))
        try:
            if self._folder is None:
                self._start()
            assert self._folder is not None
            for connection in self._connections:
                with contextlib.suppress(ConnectionError):  # the rank has died: that is noticed below
                    connection.send_bytes(call)
            return _collect(self._connections, self._processes, Path(self._folder.name), self._timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, and those that they have started."""
        for connection in self._connections:
            connection.close()  # finished ranks then exit
        for process in self._processes:
            process.join(0.5)
            process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._connections, self._processes = None, [], []

    def _start(self) -> None:
        context = _context()
        self._folder = tempfile.TemporaryDirectory(prefix="wholebatch-ranks-")
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            arguments = (rank, self._world_size, self._backend, self._timeout_s, self._folder.name, theirs)
            process = context.Process(
                target=run_rank, args=(*arguments, list(sys.path), warnings.filters), name=f"rank {rank}", daemon=True
            )
            process.start()
            self._processes.append(process)
            theirs.close()


def _run_in_process(fn: Callable[..., _T], args: tuple[Any, ...], backend: str) -> _T:
    if dist.is_initialized():
        raise ValueError("world_size=1 runs in this process, which already has a default process group")
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, not listed in __all__
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        result: _T = to_cpu(fn(*args))
        return result
    finally:
        dist.destroy_process_group()


def _context() -> Any:
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        # torch's optimizers and FSDP import torch._dynamo: once, here
        modules = "torch torch._dynamo torch.nn.parallel wholebatch._torch_names wholebatch._launch.preload"
        context.set_forkserver_preload([*modules.split(), __name__])
    return context


def pickled(value: Any) -> bytes:
    """Return a function, or a value that holds functions, pickled for other processes; by cloudpickle if installed."""
    try:
        import cloudpickle
    except ImportError:
        cloudpickle = None
    try:
        return bytes((cloudpickle or pickle).dumps(value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        hint = "" if cloudpickle else "; define it at the top level of a module, or pip install cloudpickle"
        raise ValueError(f"fn and its arguments must be picklable to reach other processes: {error}{hint}") from None


def _collect(connections: list[Connection], processes: list[Any], folder: Path, timeout_s: float) -> list[Any]:
    """Return every rank's result; raise if one failed, died or is late."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending = dict(enumerate(connections))
    deadline = time.monotonic() + timeout_s
    timed_out = False
    while pending:
        ready = multiprocessing.connection.wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            timed_out = not failures
            break
        for rank in [rank for rank, connection in pending.items() if connection in ready]:
            try:
                succeeded, payload = pending.pop(rank).recv()
            except EOFError:
                processes[rank].join()
                succeeded, payload = False, f"died silently, exit code {processes[rank].exitcode}\n"
            if succeeded:
                results[rank] = pickle.loads(payload)
            else:
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failures[rank] = payload
    if not pending and not failures:
        return [results[rank] for rank in range(len(connections))]

    stacks = _stacks(list(pending), processes, folder)
    if timed_out:
        lines = [f"timed out after {timeout_s} s"]
    else:
        lines = [f"{len(failures)} of {len(connections)} ranks failed, rank {next(iter(failures))} first"]
    for rank in range(len(connections)):
        if rank in failures:
            lines.append(f"--- rank {rank} failed:\n{failures[rank].rstrip()}")
        elif rank in pending:
            lines.append(f"--- rank {rank} did not finish; it was here:\n{stacks.get(rank, '(unknown)').rstrip()}")
        else:
            lines.append(f"--- rank {rank} finished")
    raise (RankTimeoutError if timed_out else RankError)("\n".join(lines))


def _stacks(ranks: list[int], processes: list[Any], folder: Path) -> dict[int, str]:
    """Return the current stack of each of the given ranks."""
    if STACK_SIGNAL is None:
        return {}
    for rank in ranks:
        if processes[rank].is_alive() and stack_file(folder, rank).exists():
            os.kill(processes[rank].pid, STACK_SIGNAL)
    time.sleep(0.3 if ranks else 0.0)
    return {rank: stack_file(folder, rank).read_text() for rank in ranks if stack_file(folder, rank).exists()}
