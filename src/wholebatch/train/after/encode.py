"""Features of items in their order, by this process or by several."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._base.user_error import UserError
from ..._measure import threads_of_a_rank
from ..data.feed import WorkerDiedError, automatic_workers, prepared
from ..data.sides import Chosen, FilePictures
from ..encoders.inputs import to_device
from ..ranks.local_ranks import RankDiedError, one_line
from ..tasks.batches import Reader, RowInputs
from .items import Items
from .open_run import OpenRun, device_of, open_run
from .options import EncodingOptions, Weights


class Work(NamedTuple):
    """How to compute features."""

    batch_size: int
    workers: int
    ranks: int
    device: str
    weights: Weights
    trust: bool

    @classmethod
    def of(cls, options: EncodingOptions) -> Work:
        """Return that of a command's options."""
        ranks = getattr(options, "ranks", 1)
        return cls(options.batch_size, options.workers, ranks, options.device, options.weights, options.trust)

    def workers_to_read(self) -> int:
        """Return how many processes of each rank read pictures."""
        return self.workers if self.workers >= 0 else automatic_workers(self.ranks)


def features_of(
    run: OpenRun, items: Items, work: Work, open_again: Callable[[OpenRun], Items] | None = None
) -> Iterator[Tensor]:
    """Yield the features of the items, (at most `work.batch_size`, width), in order.

    The batches are the same on any number of ranks.

    Args:
        run: the run.
        items: the items.
        work: how to compute.
        open_again: how another process gets these items; needed for several ranks.

    Raises:
        UserError: an item that cannot be read; RankDiedError if a process has died.
    """
    parts = [*items.rows.split(work.batch_size)]
    if work.ranks == 1 or len(parts) == 1:
        yield from _features(run, items, parts, work)
        return
    assert open_again is not None
    yield from _of_ranks(run, items, len(parts), work, open_again)


def _features(run: OpenRun, items: Items, parts: list[Tensor], work: Work) -> Iterator[Tensor]:
    prepare = RowInputs(items.side, Reader.of(run.encoder(items.name)))
    try:
        for inputs in prepared(prepare, parts, workers=_workers(items, work)):
            yield run.features(items.name, to_device(inputs, run.device))
    except WorkerDiedError as error:
        raise UserError(f"a process that reads the rows {error}") from error


def _workers(items: Items, work: Work) -> int:
    is_quick = not isinstance(items.side, (FilePictures, Chosen)) or len(items) <= work.batch_size
    return 0 if work.workers < 0 and is_quick else work.workers_to_read()


def _of_ranks(
    run: OpenRun, items: Items, count: int, work: Work, open_again: Callable[[OpenRun], Items]
) -> Iterator[Tensor]:
    """Yield the features of `count` parts; part i is computed by rank i mod ranks, and read when its turn comes."""
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(work.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, run.folder, items.rows, work, open_again, theirs), daemon=False
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        for part in range(count):
            rank = part % work.ranks
            yield _received(connections[rank], processes[rank], rank)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for connection in connections:
            connection.close()


def _received(connection: Connection, process: SpawnProcess, rank: int) -> Tensor:
    try:
        message = connection.recv()
    except EOFError as error:
        process.join()
        raise RankDiedError(f"rank {rank} has ended with exit code {process.exitcode} before it was done") from error
    if isinstance(message, str):
        raise UserError(message)
    return torch.from_numpy(message)


def _rank(
    rank: int, folder: Path, rows: Tensor, work: Work, open_again: Callable[[OpenRun], Any], connection: Connection
) -> None:
    """Compute every `work.ranks`-th part and send it; of an error the message is sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    torch.set_num_threads(threads_of_a_rank(work.ranks))
    try:
        run = open_run(folder, device_of(work.device, rank, work.ranks), work.weights, trust=work.trust)
        items = open_again(run)
        parts = [*rows.split(work.batch_size)][rank :: work.ranks]
        for features in _features(run, items, parts, work):
            connection.send(features.numpy())
    except UserError as error:
        with contextlib.suppress(OSError):
            connection.send(str(error))
    except BrokenPipeError:
        return  # the process that started this one has ended
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send(f"rank {rank}: {type(error).__name__}: {one_line(error)}")
