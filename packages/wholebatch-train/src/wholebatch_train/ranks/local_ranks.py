"""The ranks of `--ranks`: processes that this one starts, forwards its signals to, and ends together.

Ranks meet through a file. The first that fails ends the others, because a collective without it would never return. The
run can be resumed, so only the steps since the last checkpoint are lost.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from wholebatch.app import UserError

from ..config import TrainConfig
from ..run.resume import how_to_resume
from .signals import FINISHING, STOP, Inbox, Patience, Stopped, name, show, signals_blocked

Body = Callable[[TrainConfig, str, int, Connection], None]
"""The run of one rank: (configuration, URL where ranks meet, rank, connection to the starting process)."""


_RAISED = 1  # exit code
_KINDS = ("mistake", "stopped", "died", "raised")
"""Of failures: the first one counts; before the last, the death of a rank without a report."""


class RankDiedError(UserError):
    """A rank has ended without a result, and with it the run."""

    exit_code = 1


@dataclass(frozen=True)
class _Failure:
    """The report of a rank that fails, written just before it ends."""

    kind: str
    """One of `_KINDS`."""
    text: str
    signum: int = 0
    trace: str = ""
    at_ns: int = 0


def run_local_ranks(config: TrainConfig, body: Body) -> None:
    """Run `body` on `config.ranks` processes; all of them have ended on return.

    Raises:
        UserError: for a mistake that a rank has found; RankDiedError if a rank has died.
        Stopped: if a signal has ended the run.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="wholebatch-train-") as folder, closing(Inbox()) as signals:
        ranks: list[SpawnProcess] = []
        connections: list[Connection] = []
        try:
            for rank in range(config.ranks):
                theirs, ours = context.Pipe()
                process = context.Process(target=_rank, args=(rank, config, folder, theirs, body))
                with signals_blocked():
                    process.start()
                theirs.close()
                ranks.append(process)
                connections.append(ours)
            ended = _watch(ranks, connections, signals, config)
        finally:
            _end(ranks)
            for connection in connections:
                connection.close()
        if ended:
            raise _cause(ended, ranks, Path(folder), config)


def _watch(
    ranks: Sequence[SpawnProcess], connections: Sequence[Connection], signals: Inbox, config: TrainConfig
) -> list[int]:
    """Forward signals to the ranks until all have ended, or one with a failure; return those that had ended then."""
    patience, announced, training = Patience(), False, False
    sentinels = {process.sentinel: rank for rank, process in enumerate(ranks)}
    ended: list[int] = []
    while sentinels:
        ready = wait([*sentinels, signals.socket, *([] if training else connections[:1])])
        training = training or connections[0] in ready  # it says so; or it has ended, which is noticed below
        for number in signals.read():
            if number in STOP and not training:
                _end(ranks)
                raise Stopped(number, f"{name(number)}: ended before the first step{_resume(config)}")
            if number in STOP and patience.is_second():
                _end(ranks)
                raise Stopped(number, f"{name(number)}: ended at once{_resume(config)}")
            if number in STOP and not announced:
                announced = True
                show(FINISHING.format(name(number)))
            for connection in connections:
                with suppress(OSError):  # of a rank that has just ended, which shows next
                    connection.send(number)
        ended += _pop_ended(ranks, sentinels, timeout_s=0)
        codes = {ranks[rank].exitcode for rank in ended} - {0}
        if codes:
            if codes == {_RAISED}:  # perhaps because another rank is gone, which shows in a moment
                ended += _pop_ended(ranks, sentinels, timeout_s=0.5)
            return ended
    return []


def _pop_ended(ranks: Sequence[SpawnProcess], sentinels: dict[int, int], timeout_s: float) -> list[int]:
    """Return the ranks that have ended since the last call, and remove their sentinels."""
    ended = [sentinels.pop(sentinel) for sentinel in wait([*sentinels], timeout_s) if isinstance(sentinel, int)]
    for rank in ended:
        ranks[rank].join()
    return ended


def _end(ranks: Sequence[SpawnProcess]) -> None:
    """Kill the ranks that have not ended: everything worth keeping has been written."""
    for process in ranks:
        if process.exitcode is None:
            process.kill()
    for process in ranks:
        process.join()


def _cause(ended: Sequence[int], ranks: Sequence[SpawnProcess], folder: Path, config: TrainConfig) -> Exception:
    """Return the error that ended the run; `ended` are the ranks that ended by themselves.

    A rank whose partner is gone raises within moments: a death counts before an error, and the earliest error counts.
    """
    failures = {int(path.stem): _Failure(**json.loads(path.read_text())) for path in folder.glob("*.json")}
    order = sorted(failures, key=lambda rank: (_KINDS.index(failures[rank].kind), failures[rank].at_ns))
    first = failures[order[0]] if order else None
    if first is not None and first.kind == "stopped":
        return Stopped(first.signum)
    if first is not None and first.kind != "raised":
        return UserError(first.text) if first.kind == "mistake" else RankDiedError(first.text)
    for rank in ended:
        code = ranks[rank].exitcode
        if rank not in failures and code:
            return _death_error(f"rank {rank} of {len(ranks)}", code, _resume(config))
    assert first is not None
    sys.stderr.write(first.trace)
    return RankDiedError(
        f"rank {order[0]} of {len(ranks)} ended with {first.text}; the other ranks were ended{_resume(config)}"
    )


def _death_error(who: str, code: int, resume: str) -> Exception:
    """Return the error of a rank that has ended without a report."""
    if code - 128 in STOP:
        signum = code - 128
        return Stopped(signum, f"{name(signum)}: {who} ended at once, and the others with it{resume}")
    memory = " (was the machine out of memory?)" if code == -signal.SIGKILL else ""
    how = f"was killed by {name(-code)}{memory}" if code < 0 else f"ended with exit code {code}"
    return RankDiedError(f"{who} {how}; the other ranks were ended{resume}")


def _resume(config: TrainConfig) -> str:
    return how_to_resume(config.run_folder, config, "; nothing was written yet")


def _rank(rank: int, config: TrainConfig, folder: str, launcher: Connection, body: Body) -> None:
    """Run a process that `run_local_ranks` has started, and report its failure in `folder`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(config.ranks)}
    try:
        body(config, (Path(folder) / "store").as_uri(), rank, launcher)
    except Stopped as stopped:
        failure = _Failure("stopped", "", stopped.signum)
    except Exception as error:
        if is_connection_error(error):
            failure = _Failure("raised", f"a lost connection to another rank: {one_line(error)}")
        elif isinstance(error, UserError):
            failure = _Failure("died" if isinstance(error, RankDiedError) else "mistake", str(error))
        else:
            failure = _Failure("raised", f"{type(error).__name__}: {one_line(error)}", 0, traceback.format_exc())
    else:
        _leave(0)
    path = Path(folder) / f"{rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**vars(failure), "at_ns": time.time_ns()}))
    partial.replace(path)
    _leave({"mistake": UserError.exit_code, "stopped": 128 + failure.signum}.get(failure.kind, _RAISED))


def is_connection_error(error: BaseException) -> bool:
    """Return whether an error, of whatever origin, means that another process cannot be reached or is gone."""
    return isinstance(error, dist.DistNetworkError | dist.DistStoreError | dist.DistBackendError) or any(
        text in str(error) for text in ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
    )


def one_line(error: BaseException) -> str:
    """Return an error's text without its line breaks, shortened."""
    return textwrap.shorten(str(error), 300)


def _leave(code: int) -> NoReturn:
    """End this process without the interpreter's teardown, in which gloo's threads occasionally abort (torch 2.13)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
