"""Features of items in their order, by this process or by several."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.app import UserError
from wholebatch.app.tensors import threads_of_a_rank

from ..data.loader import WorkerDiedError, automatic_workers, prepared
from ..data.sides import Chosen, FilePictures
from ..encoders.inputs import to_device
from ..ranks.all_ranks import device_of
from ..ranks.local_ranks import RankDiedError, one_line
from ..tasks.batches import Reader, RowInputs
from .items import Items, open_items
from .open_run import OpenRun, open_run
from .options import EncodingOptions
from .output import say

_LINE_EVERY_S = 10


def opened(options: EncodingOptions) -> OpenRun:
    """Open the run of a command, and print a line about weights that are not the final ones."""
    run = open_run(options.run, device_of(options.device, 0, options.processes), options.weights, trust=options.trust)
    if run.weights_line:
        say(run.weights_line)
    return run


def features_of(run: OpenRun, items: Items, options: EncodingOptions, argument: str = "DATA") -> Iterator[Tensor]:
    """Yield the features of the items, (at most `options.batch_size`, width), in order.

    The batches are the same on any number of ranks.

    Args:
        run: the run.
        items: the items.
        options: how to compute.
        argument: the name of the data on the command line, for errors.

    Raises:
        UserError: an item that cannot be read; RankDiedError if a process has died.
    """
    parts = [*items.rows.split(options.batch_size)]
    if options.processes == 1 or len(parts) == 1:
        yield from _features(run, items, parts, options)
    else:
        yield from _rank_parts(run, items, len(parts), options, argument)


def with_progress(tiles: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    """Yield the tiles; print a line every ten seconds."""
    began = last = time.monotonic()
    done = 0
    for tile in tiles:
        yield tile
        done += len(tile)
        now = time.monotonic()
        if now - last >= _LINE_EVERY_S and done < count:
            last = now
            say(f"{done:,} of {count:,} rows, {now - began:.0f} s")


def _features(run: OpenRun, items: Items, parts: list[Tensor], options: EncodingOptions) -> Iterator[Tensor]:
    prepare = RowInputs(items.side, Reader.of(run.encoder(items.name)))
    try:
        for inputs in prepared(prepare, parts, workers=_workers(items, options)):
            yield run.features(items.name, to_device(inputs, run.device))
    except WorkerDiedError as error:
        raise UserError(f"a process that reads the rows {error}") from error


def _workers(items: Items, options: EncodingOptions) -> int:
    """Return how many processes of each rank read pictures."""
    if options.workers >= 0:
        return options.workers
    is_quick = not isinstance(items.side, (FilePictures, Chosen)) or len(items) <= options.batch_size
    return 0 if is_quick else automatic_workers(options.processes)


def _rank_parts(run: OpenRun, items: Items, count: int, options: EncodingOptions, argument: str) -> Iterator[Tensor]:
    """Yield the features of `count` parts; part i is computed by rank i mod ranks, and read when its turn comes."""
    context = multiprocessing.get_context("spawn")
    again = {"data": items.source, "argument": argument, "column": items.column, "side": items.name}
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(options.processes):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, run.folder, items.rows, again, options, theirs), daemon=False
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        for part in range(count):
            rank = part % options.processes
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
    rank: int, folder: Path, rows: Tensor, again: dict[str, Any], options: EncodingOptions, connection: Connection
) -> None:
    """Compute every `options.processes`-th part and send it; of an error the message is sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    torch.set_num_threads(threads_of_a_rank(options.processes))
    try:
        run = open_run(folder, device_of(options.device, rank, options.processes), options.weights, trust=options.trust)
        items = open_items(run, **again, skip_bad=None)
        parts = [*rows.split(options.batch_size)][rank :: options.processes]
        for features in _features(run, items, parts, options):
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
