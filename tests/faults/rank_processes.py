"""W real processes that do what they are told, one step at a time; one that dies or hangs is an answer, too."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 5.0  # of a process group's operations
HANG_S = 4 * TIMEOUT_S  # a call may wait for more than one of them in turn
_PATIENCE_S = 120  # for what has nothing wrong in it, on a machine that is busy


@dataclass(frozen=True)
class Lost:
    """A process that ended, or did not answer."""

    hangs: bool
    how: str


class Ranks:
    """Processes in a fresh process group, with a short timeout."""

    def __init__(self, size: int, timeout_s: float = TIMEOUT_S) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.nn.parallel", "wholebatch._torch_names"])
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
        self.alive = True

    def ask(self, *command: Any, within_s: float = _PATIENCE_S) -> list[Any]:
        """What each rank answers, or `Lost`."""
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
                    self.processes[rank].join(5)
                    answers[rank] = Lost(False, f"exit code {self.processes[rank].exitcode}; {self.stderr(rank)}")
        self.alive = self.alive and not any(isinstance(answer, Lost) for answer in answers.values())
        return [answers[rank] for rank in range(len(self.connections))]

    def stderr(self, rank: int, lines: int = 3) -> str:
        """The end of what the rank has printed."""
        text = (Path(self.folder) / f"stderr-{rank}").read_text(errors="replace").strip()
        return " | ".join(text.splitlines()[-lines:])[-200 * lines :]

    def _where(self, rank: int) -> str:
        """Where a rank is that does not answer."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self.stderr(rank, lines=12)

    def close(self) -> None:
        """End the processes that this started."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
        for path in sorted(Path(self.folder).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        Path(self.folder).rmdir()


def _serve(rank: int, size: int, folder: str, timeout_s: float, connection: Any, path: list[str]) -> None:
    """The life of one rank."""
    sys.path[:] = path
    errors = os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    faulthandler.register(signal.SIGUSR1, file=errors, all_threads=False)
    import torch
    import torch.distributed as dist
    from case import Case

    from wholebatch.testing import _use_loopback

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _use_loopback()
    init = {"init_method": Path(folder, "store").as_uri(), "rank": rank, "world_size": size}
    dist.init_process_group("gloo", **init, timeout=timedelta(seconds=timeout_s))  # type: ignore[arg-type]
    case = None
    with contextlib.suppress(EOFError):
        while True:
            command, *args = connection.recv()
            answer: Any = None
            if command == "begin":
                case = Case(*args, rank, size, None, folder)
                answer = case.facts()
            elif command != "ready":
                answer = getattr(case, command)()
            connection.send(answer)
    os.kill(os.getpid(), signal.SIGKILL)  # without the end of the interpreter, in which threads of gloo may abort
