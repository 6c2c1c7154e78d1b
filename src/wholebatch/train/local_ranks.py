"""The ranks of `--processes`: started here, sent the signals that this process gets, and ended together.

Ranks meet in a file. The first that does not end well ends the others, for a collective without it would never end; the
run can be resumed, so nothing is lost but the steps since the last checkpoint.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Literal, NoReturn

import torch.distributed as dist

from .._user_error import UserError
from .config import TrainConfig
from .signals import (
    FINISHING,
    STOP,
    Inbox,
    Patience,
    Stopped,
    how_to_resume,
    inbox,
    name,
    say,
    show_cursor,
    signals_blocked,
)

Body = Callable[[TrainConfig, str, int, Connection], None]
"""One rank's run: configuration, where the ranks meet, rank, and where the starting process sends its signals."""


_RAISED = 1  # exit code


class RankDiedError(UserError):
    """A rank has ended without a result, and with it the run."""

    exit_code = 1


@dataclass(frozen=True)
class _LastWords:
    """What a rank says before it ends, other than well."""

    kind: Literal["mistake", "stopped", "raised"]
    text: str
    signum: int = 0
    trace: str = ""
    at_ns: int = 0


def run_local_ranks(config: TrainConfig, body: Body) -> None:
    """Run `body` on as many processes as the configuration says; every one of them has ended on return.

    Raises:
        UserError: for a mistake that a rank has found, and RankDiedError if one has died.
        Stopped: if a signal has ended the run.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="wholebatch-train-") as folder, inbox() as signals:
        ranks: list[SpawnProcess] = []
        lines: list[Connection] = []
        try:
            for rank in range(config.processes):
                theirs, ours = context.Pipe()
                process = context.Process(target=_rank, args=(rank, config, folder, theirs, body), daemon=True)
                with signals_blocked():
                    process.start()
                theirs.close()
                ranks.append(process)
                lines.append(ours)
            _watch(ranks, lines, signals, config)
        except _Ended as ended:
            _end(ranks)
            raise _why(ended.ranks, ranks, Path(folder), config) from None
        finally:
            _end(ranks)
            for line in lines:
                line.close()


class _Ended(Exception):  # noqa: N818
    """These ranks have ended, one of them not well, and not because this process has ended them."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def _watch(
    ranks: Sequence[SpawnProcess], lines: Sequence[Connection], signals: Inbox | None, config: TrainConfig
) -> None:
    """Wait until all ranks have ended well, and hand on signals."""
    patience, told, training = Patience(), False, False
    sentinels = {process.sentinel: rank for rank, process in enumerate(ranks)}
    inboxes = [] if signals is None else [signals]
    ended: list[int] = []
    while sentinels:
        ready = wait([*sentinels, *(box.socket for box in inboxes), *([] if training else lines[:1])])
        training = training or lines[0] in ready  # it says so; or it has ended, and that is seen below
        for number in [number for box in inboxes for number in box.read()]:
            if number in STOP and not training:
                _end(ranks)
                raise Stopped(number, f"{name(number)}: ended before the first step{_resume(config)}")
            if number in STOP and patience.is_second():
                _end(ranks)
                show_cursor()
                raise Stopped(number, f"{name(number)}: ended at once{_resume(config)}")
            if number in STOP and not told:
                told = True
                say(FINISHING.format(name(number)))
            _hand_on(number, lines)
        ended += _ended(ranks, sentinels, timeout_s=0)
        codes = {ranks[rank].exitcode for rank in ended} - {0}
        if codes:
            if codes == {_RAISED}:  # perhaps because another rank is gone, which is seen in a moment
                ended += _ended(ranks, sentinels, timeout_s=0.5)
            raise _Ended(ended)


def _ended(ranks: Sequence[SpawnProcess], sentinels: dict[int, int], timeout_s: float) -> list[int]:
    """The ranks that have ended since the last call; their sentinels are removed."""
    found = [sentinels.pop(one) for one in wait([*sentinels], timeout_s) if isinstance(one, int)]
    for rank in found:
        ranks[rank].join()
    return found


def _hand_on(number: int, lines: Sequence[Connection]) -> None:
    for line in lines:
        try:
            line.send(number)
        except OSError:
            continue  # that rank has just ended, and is seen next


def _end(ranks: Sequence[SpawnProcess]) -> None:
    """End the ranks that have not ended, at once: what is worth keeping has been written."""
    for process in ranks:
        if process.exitcode is None:
            process.kill()
    for process in ranks:
        process.join()


def _why(ended: Sequence[int], ranks: Sequence[SpawnProcess], folder: Path, config: TrainConfig) -> Exception:
    """Of all that has happened, the cause; `ended` are the ranks that nobody here has ended.

    A rank whose partner is gone raises within moments: a death counts before an error, and the earliest error counts.
    """
    words = {int(path.stem): _LastWords(**json.loads(path.read_text())) for path in folder.glob("*.json")}
    order = sorted(words, key=lambda rank: words[rank].at_ns)
    for rank in order:
        if words[rank].kind == "mistake":
            return UserError(words[rank].text)
    for rank in order:
        if words[rank].kind == "stopped":
            return Stopped(words[rank].signum)
    for rank in ended:
        code = ranks[rank].exitcode
        if rank not in words and code:
            return _died(f"rank {rank} of {len(ranks)}", code, _resume(config))
    rank = order[0]
    sys.stderr.write(words[rank].trace)
    return RankDiedError(
        f"rank {rank} of {len(ranks)} ended with {words[rank].text}; the other ranks were ended{_resume(config)}"
    )


def _died(who: str, code: int, resume: str) -> Exception:
    """A rank has ended without a word."""
    if code - 128 in STOP:
        signum = code - 128
        return Stopped(signum, f"{name(signum)}: {who} ended at once, and the others with it{resume}")
    memory = " (was the machine out of memory?)" if code == -signal.SIGKILL else ""
    how = f"was killed by {name(-code)}{memory}" if code < 0 else f"ended with exit code {code}"
    return RankDiedError(f"{who} {how}; the other ranks were ended{resume}")


def _resume(config: TrainConfig) -> str:
    return how_to_resume(config.run_folder, "; nothing was written yet")


def _rank(rank: int, config: TrainConfig, folder: str, launcher: Connection, body: Body) -> None:
    """The life of a process that `run_local_ranks` has started."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(config.processes)}
    try:
        body(config, (Path(folder) / "store").as_uri(), rank, launcher)
    except Stopped as stopped:
        words = _LastWords("stopped", "", stopped.signum)
    except Exception as error:
        if is_of_a_connection(error):
            words = _LastWords("raised", f"a lost connection to another rank: {one_line(error)}")
        elif isinstance(error, UserError):
            words = _LastWords("mistake", str(error))
        else:
            words = _LastWords("raised", f"{type(error).__name__}: {one_line(error)}", 0, traceback.format_exc())
    else:
        _leave(0)
    path = Path(folder) / f"{rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**vars(words), "at_ns": time.time_ns()}))
    partial.replace(path)
    _leave({"mistake": UserError.exit_code, "stopped": 128 + words.signum}.get(words.kind, _RAISED))


def is_of_a_connection(error: BaseException) -> bool:
    """Whether an error says that another process cannot be reached, or is gone; whoever has raised it."""
    return isinstance(error, dist.DistNetworkError | dist.DistStoreError | dist.DistBackendError) or any(
        sign in str(error) for sign in ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
    )


def one_line(error: BaseException) -> str:
    """What an error says, without a library's line breaks."""
    return textwrap.shorten(str(error), 300)


def _leave(code: int) -> NoReturn:
    """End this process without the interpreter's teardown, in which gloo's threads abort now and then (torch 2.13)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
