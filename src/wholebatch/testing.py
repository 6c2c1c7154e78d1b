"""Run a function on W real processes, for tests: no ports, no launcher, no hang.

Each rank is a process of its own in a gloo process group that meets in a file. The processes are forked from a
server that has imported torch and nothing else, so a call costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ._settings import check_callable, check_instance, check_integer, check_positive_number, shown

__all__ = ["RankError", "RankTimeoutError", "assert_exact", "preload", "run_ranks"]

_PRELOADED = "WHOLEBATCH_PRELOAD"  # read by `wholebatch._preload`
_MOST_SECONDS = 1e9
_MOST_RANKS = 1024  # processes of one call
_GRACE_S = 5.0  # how long the other ranks may take to notice that one has failed
_STACK_SIGNAL = getattr(signal, "SIGUSR1", None)  # asks a rank where it is; not on Windows


class RankError(RuntimeError):
    """A rank raised, died or did not finish; the message holds what every rank was doing."""


class RankTimeoutError(RankError, TimeoutError):
    """Some rank did not finish in time."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", timeout_s: float = 60
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks of a fresh default process group and return each rank's result.

    Inside `fn`, `torch.distributed` is initialized: `dist.get_rank()` tells the ranks apart. Each rank computes with
    one thread, with this process's import path and warning filters, and with the environment variables that were set
    when the first call was made. It may start processes, as a `DataLoader` with workers does; those that are left when
    `fn` returns, fails or is late are ended. With `world_size=1` the call happens in this process.

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
        RankTimeoutError: if a rank has not finished after `timeout_s`, with the place where each such rank is.
        ValueError: if `world_size < 1`, if `fn` cannot travel, or if W = 1 inside an existing process group.

    >>> import torch.distributed as dist
    >>> run_ranks(dist.get_world_size, 1)
    [1]
    """
    check_callable("fn", fn)
    check_integer("world_size", world_size, least=1, most=_MOST_RANKS, of="ranks on this machine")
    _check_backend(backend)
    if check_positive_number("timeout_s", timeout_s, "it is how long the call may take, in seconds") > _MOST_SECONDS:
        raise ValueError(f"timeout_s must be at most {_MOST_SECONDS:g} seconds, got {timeout_s}")
    if world_size == 1:
        return [_run_in_process(fn, args, backend)]
    return run_processes(fn, world_size, *args, backend=backend, timeout_s=timeout_s)


def _check_backend(backend: object) -> None:
    """backend names process groups that this torch has: one, or one for each kind of device, as in "cpu:gloo"."""
    names = backend.split(",") if isinstance(backend, str) else []
    if not names or not all(dist.is_backend_available(name.rpartition(":")[2].strip().lower()) for name in names):
        raise ValueError(f"backend must be one that this torch has, such as 'gloo' or 'nccl'; got {shown(backend)}")


def assert_exact(problem: Any, world_sizes: Sequence[int] = (1, 2, 3), **options: Any) -> None:
    """Assert that the gradient that W ranks end with is that of one process on the whole batch.

    Args:
        problem: as in :func:`wholebatch.audit`.
        world_sizes: as there.
        **options: as there.

    Raises:
        AssertionError: if it is not, with the whole report: what is wrong, why, and what mends it.
        ValueError: as :func:`wholebatch.audit`.

    >>> import wholebatch as wb
    >>> def test_my_training_step():
    ...     wb.testing.assert_exact("my_project.audits:clip", world_sizes=(1, 2, 4))
    """
    __tracebackhide__ = True
    from .auditing import audit  # a layer above this one

    report = audit(problem, world_sizes, **options)
    if not report.exact:
        raise AssertionError(str(report))


def preload(*modules: str) -> None:
    """Have these modules imported once, before the first call of :func:`run_ranks`, and not by each rank anew.

    They must not compute anything when they are imported.
    """
    for name in modules:
        check_instance("modules", name, str, "names of modules, as in an import")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"modules must be names of modules, as in an import; got {shown(name)}")
    before = os.environ.get(_PRELOADED, "").split(",")
    os.environ[_PRELOADED] = ",".join(dict.fromkeys(name for name in (*before, *modules) if name))


def start_server() -> None:
    """Let the server of rank processes begin with its imports now, and not when the first rank is wanted."""
    if _context().get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def run_processes(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", timeout_s: float = 60
) -> list[Any]:
    """As :func:`run_ranks`, but one rank, too, is a process of its own."""
    call = pickled((fn, args))
    context = _context()
    with tempfile.TemporaryDirectory(prefix="wholebatch-ranks-") as folder:
        connections: list[Connection] = []
        processes: list[Any] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                connections.append(ours)
                process = context.Process(
                    target=_rank_main,
                    args=(rank, world_size, call, backend, timeout_s, folder, theirs, list(sys.path), warnings.filters),
                    name=f"rank {rank}",
                    daemon=True,
                )
                process.start()
                processes.append(process)
                theirs.close()
            return _collect(connections, processes, Path(folder), timeout_s)
        finally:
            for connection in connections:
                connection.close()  # lets the ranks that have finished go
            for process in processes:
                process.join(0.5)
                process.kill()
                with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                process.join()


def _run_in_process(fn: Callable[..., Any], args: tuple[Any, ...], backend: str) -> Any:
    if dist.is_initialized():
        raise ValueError("world_size=1 runs in this process, which already has a default process group")
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, not listed in __all__
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        return _to_cpu(fn(*args))
    finally:
        dist.destroy_process_group()


def _context() -> Any:
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(
            # torch's optimizers and FSDP import torch._dynamo: once, here
            ["torch", "torch._dynamo", "torch.nn.parallel", __name__, "wholebatch._torch_names", "wholebatch._preload"]
        )
    return context


def pickled(value: Any) -> bytes:
    """A function, or what holds some, for other processes."""
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
    """Wait for every rank's outcome; raise if one failed, died or is late."""
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
                succeeded, payload = False, f"died without a word, exit code {processes[rank].exitcode}\n"
            if succeeded:
                results[rank] = pickle.loads(payload)
            else:
                if not failures:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
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
    """Where the given ranks are right now."""
    if _STACK_SIGNAL is None:
        return {}
    for rank in ranks:
        if processes[rank].is_alive() and _stack_file(folder, rank).exists():
            os.kill(processes[rank].pid, _STACK_SIGNAL)
    time.sleep(0.3 if ranks else 0.0)
    return {rank: _stack_file(folder, rank).read_text() for rank in ranks if _stack_file(folder, rank).exists()}


def _stack_file(folder: Path | str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}.txt"


def _rank_main(
    rank: int,
    world_size: int,
    call: bytes,
    backend: str,
    timeout_s: float,
    folder: str,
    connection: Connection,
    path: list[str],
    filters: list[Any],
) -> None:
    """The life of one rank's process."""
    if hasattr(os, "setsid"):
        os.setsid()  # a group of its own, so that what it starts ends with it
    # To the caller it is a daemon, which the caller's end ends. As one it could not start processes.
    multiprocessing.current_process().daemon = False
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    sys.path[:] = path
    warnings.filters[:] = filters  # type: ignore[index]
    torch.set_num_threads(1)
    with _stack_file(folder, rank).open("w") as stack_file:
        if _STACK_SIGNAL is not None:
            faulthandler.register(_STACK_SIGNAL, file=stack_file, all_threads=False)
        try:
            _use_loopback()
            dist.init_process_group(
                backend,
                init_method=(Path(folder) / "store").as_uri(),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s + _GRACE_S),  # the caller reports a hang before the collective does
            )
            dist.barrier()  # no rank leaves before all are connected
            fn, args = pickle.loads(call)
            outcome: tuple[bool, bytes | str] = (True, pickle.dumps(_to_cpu(fn(*args))))
        except BaseException:  # also SystemExit: whatever ends a rank early is the caller's to see
            outcome = (False, traceback.format_exc())
        # Pickled by value, above: multiprocessing's own pickling would share memory with a process about to end.
        try:
            connection.send(outcome)
            if outcome[0]:
                connection.poll(timeout_s)  # stay connected until the caller has heard from all ranks
        except BrokenPipeError:
            os._exit(1)  # the caller has given up on this rank
        sys.stdout.flush()
        sys.stderr.flush()
        # Collectives under way have threads that would keep a failed rank's process alive.
        os._exit(0 if outcome[0] else 1)


def _end_with_the_caller() -> None:
    """Wait for the end of the process that called `run_ranks`; a rank without it has nobody to tell."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        multiprocessing.connection.wait([caller.sentinel])
        with contextlib.suppress(AttributeError):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def _use_loopback() -> None:
    """Let gloo talk over the loopback interface: all ranks are on this machine, whatever its host name resolves to."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _to_cpu(value: Any) -> Any:
    """Tensors detached and on the CPU, inside the usual containers."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_to_cpu(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
