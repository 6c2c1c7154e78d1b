"""The life of one rank's process: join the process group, call functions, send their results, end.

`processes` starts these processes and waits for them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._base.trees import map_leaves

GRACE_S = 5.0  # how long the other ranks may take to notice that one has failed
STACK_SIGNAL = getattr(signal, "SIGUSR1", None)  # asks a rank for its stack; does not exist on Windows


def stack_file(folder: Path | str, rank: int) -> Path:
    """Return the file into which a rank writes its stack when it gets `STACK_SIGNAL`."""
    return Path(folder) / f"stack-{rank}.txt"


def run_rank(
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    folder: str,
    connection: Connection,
    path: list[str],
    filters: list[Any],
) -> None:
    """Join the process group, answer each call by `(succeeded, result or traceback)`, and exit after the last one."""
    if hasattr(os, "setsid"):
        os.setsid()  # its own process group, so that the processes it starts end with it
    # The caller starts it as a daemon, so that it ends with the caller. A daemon could not start processes.
    multiprocessing.current_process().daemon = False
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    sys.path[:] = path
    warnings.filters[:] = filters  # type: ignore[index]
    torch.set_num_threads(1)
    with stack_file(folder, rank).open("w") as stack:
        if STACK_SIGNAL is not None:
            faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
        succeeded = True
        for number, call in enumerate(_calls(connection)):
            try:
                if number == 0:
                    _join_group(rank, world_size, backend, timeout_s, folder)
                fn, args = pickle.loads(call)
                outcome: bytes | str = pickle.dumps(to_cpu(fn(*args)))
            except BaseException:  # also SystemExit: the caller reports whatever ends a rank early
                succeeded, outcome = False, traceback.format_exc()
            # Pickled by value, above: multiprocessing's own pickling would share memory with a process about to end.
            try:
                connection.send((succeeded, outcome))
            except BrokenPipeError:
                os._exit(1)  # the caller has given up on this rank
            if not succeeded:
                break
        sys.stdout.flush()
        sys.stderr.flush()
        # Collectives under way have threads that would keep a failed rank's process alive.
        os._exit(0 if succeeded else 1)


def _calls(connection: Connection) -> Iterator[bytes]:
    """Yield each call that the caller sends, until it closes the connection, when it has all results."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            yield connection.recv_bytes()


def _join_group(rank: int, world_size: int, backend: str, timeout_s: float, folder: str) -> None:
    use_loopback()
    dist.init_process_group(
        backend,
        init_method=(Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s + GRACE_S),  # the caller reports a hang before the collective does
    )
    dist.barrier()  # no rank leaves before all are connected


def _end_with_the_caller() -> None:
    """Wait for the end of the process that called `run_ranks`, then end this rank and the processes it started."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        multiprocessing.connection.wait([caller.sentinel])
        with contextlib.suppress(AttributeError):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def use_loopback() -> None:
    """Let gloo use the loopback interface: all ranks are on this machine, whatever its host name resolves to."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def to_cpu(value: Any) -> Any:
    """Return the value with its tensors detached and on the CPU, inside mappings, lists and tuples."""
    return map_leaves(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, value)
