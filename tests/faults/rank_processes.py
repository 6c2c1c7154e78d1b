"""W processes that run commands, one at a time; a process that dies or hangs is an answer, too."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 5.0  # for an operation of a process group
HANG_S = 4 * TIMEOUT_S  # a call may wait for more than one of them in turn
_PATIENCE_S = 120  # for calls without a fault, on a busy machine


@dataclass(frozen=True)
class Lost:
    """A process that ended, or did not answer."""

    hangs: bool
    how: str


class Ranks:
    """Processes in a fresh process group on gloo, with a short timeout."""

    def __init__(self, size: int, timeout_s: float = TIMEOUT_S) -> None:
        context = multiprocessing.get_context("forkserver")
        # torch imports the last one at the first `torch.autograd.grad` with a cotangent: seconds on a busy machine.
        names = ["torch", "torch.nn.parallel", "wholebatch._torch_names", "torch.fx.experimental.symbolic_shapes"]
        context.set_forkserver_preload(names)
        self.folder = tempfile.mkdtemp(prefix="wholebatch-faults-")
        self.connections, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, self.folder, timeout_s, theirs, list(sys.path)), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self.pids = [process.pid for process in self.processes]
        self.alive = True

    def ask(self, *command: Any, within_s: float = _PATIENCE_S) -> list[Any]:
        """Send a command to all ranks; return each rank's answer, or `Lost`."""
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError, OSError):
                connection.send(command)
        answers: dict[int, Any] = {}
        waiting = dict(enumerate(self.connections))
        deadline = time.monotonic() + within_s
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                answers |= {
                    rank: Lost(True, f"no answer within {within_s:g} s; {self._where(rank)}") for rank in waiting
                }
                break
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    answers[rank] = waiting.pop(rank).recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = Lost(False, self._how_ended(rank))
        self.alive = self.alive and not any(isinstance(answer, Lost) for answer in answers.values())
        return [answers[rank] for rank in range(len(self.connections))]

    def stderr(self, rank: int, lines: int = 3) -> str:
        """Return the last lines that the rank has printed."""
        text = (Path(self.folder) / f"stderr-{rank}").read_text(errors="replace").strip()
        return " | ".join(text.splitlines()[-lines:])[-200 * lines :]

    def _where(self, rank: int) -> str:
        """Return the stack of a rank that does not answer."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.3)
        return self.stderr(rank, lines=12)

    def _how_ended(self, rank: int) -> str:
        self.processes[rank].join(5)
        return f"exit code {self.processes[rank].exitcode}; {self.stderr(rank)}"

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """End the processes that this started."""
        for connection in self.connections:
            connection.close()
        self._end()
        for path in sorted(Path(self.folder).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        Path(self.folder).rmdir()


class RanksOverMPI(Ranks):
    """Processes that mpiexec has started, in the environment of that name."""

    def __init__(self, size: int, timeout_s: float, environment: str) -> None:
        from mpi import ENVIRONMENTS, SETTINGS  # of tests

        programs = ENVIRONMENTS[environment] / "bin"
        self.folder = tempfile.mkdtemp(prefix="wholebatch-faults-")
        address = f"{self.folder}/address"
        with multiprocessing.connection.Listener(address, "AF_UNIX") as listener:
            arguments = [str(programs / "python"), __file__, address, str(timeout_s)]
            self.mpiexec = subprocess.Popen(
                [str(programs / "mpiexec"), "-n", str(size), *arguments],
                env=os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            found = {}
            for _ in range(size):
                connection = listener.accept()
                rank, pid = connection.recv()
                found[rank] = connection, pid
        self.connections = [found[rank][0] for rank in range(size)]
        self.pids = [found[rank][1] for rank in range(size)]
        self.alive = True

    def _how_ended(self, rank: int) -> str:
        return f"its connection has ended; {self.stderr(rank)}"

    def _end(self) -> None:
        try:
            self.mpiexec.wait(10)  # it ends with its ranks, whose connections are closed
        except subprocess.TimeoutExpired:
            self.mpiexec.kill()
            self.mpiexec.wait()


def _serve_over_mpi(address: str, timeout_s: float) -> None:
    """Run one rank that mpiexec has started."""
    import wholebatch as wb

    comm = wb.comm.MPICommunicator(timeout_s=timeout_s)
    connection = multiprocessing.connection.Client(address, "AF_UNIX")
    connection.send((comm.rank, os.getpid()))
    _obey(comm.rank, comm.size, str(Path(address).parent), comm, connection)


def _serve(rank: int, size: int, folder: str, timeout_s: float, connection: Any, path: list[str]) -> None:
    """Run one rank of a process group on gloo."""
    sys.path[:] = path
    import torch.distributed as dist

    from wholebatch._launch.rank_process import use_loopback

    use_loopback()
    init = {"init_method": Path(folder, "store").as_uri(), "rank": rank, "world_size": size}
    dist.init_process_group("gloo", **init, timeout=timedelta(seconds=timeout_s))  # type: ignore[arg-type]
    _obey(rank, size, folder, None, connection)


def _obey(rank: int, size: int, folder: str, group: Any, connection: Any) -> None:
    """Run commands until the connection is closed."""
    errors = os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    faulthandler.register(signal.SIGUSR1, file=errors, all_threads=False)
    import torch
    from case import Case

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = None
    with contextlib.suppress(EOFError):
        while True:
            command, *args = connection.recv()
            answer: Any = None
            if command == "begin":
                case = Case(*args, rank, size, group, folder)
                answer = case.facts()
            elif command != "ready":
                answer = getattr(case, command)()
            connection.send(answer)
    os.kill(os.getpid(), signal.SIGKILL)  # skips the interpreter's shutdown, in which threads of gloo may abort


if __name__ == "__main__":
    _serve_over_mpi(sys.argv[1], float(sys.argv[2]))
