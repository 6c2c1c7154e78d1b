"""`--chunk-size auto`: the largest chunk whose graph fits into the memory that is free."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from wholebatch.app.tensors import free_memory

from ..config import TrainConfig
from ..data.load import Data
from ..ranks.all_ranks import on_all_ranks
from ..ranks.sharding import is_sharded, local_parts
from .make import make_task
from .task import Task

SHARE = 0.5
"""The part of the free memory that one chunk may hold; the rest is for the loss, for longer texts and for fragments."""
_PER_WEIGHT = 3  # the gradient, and AdamW's two moments, which do not exist yet


def with_chunk_size(config: TrainConfig, data: Data, device: torch.device, *, rank: int, size: int) -> TrainConfig:
    """Return the configuration with a number of rows as its chunk size. All ranks.

    "auto" becomes the largest power of two whose measured memory fits on every rank, or 0 where all rows of a rank do.
    The ranks agree on each measurement. Each measures a model of its own, or, with sharded weights, its part of one
    model, whose passes are collective.
    """
    if not config.has_automatic_chunks:
        return config
    is_together = config.fsdp and size > 1
    rows = config.batch_size // size if is_together else -(-config.batch_size // size)
    measured = replace(config, chunk_size=0, workers=0, batch_size=config.batch_size if is_together else rows)
    place = {"rank": rank, "size": size} if is_together else {"rank": 0, "size": 1}
    task, _ = on_all_ranks("set-up", lambda: make_task(measured, data, device, **place, dense=not is_together))

    def rank_values(measure: Callable[[], int | float | None]) -> list[Any]:
        return [each["value"] for each in on_all_ranks("set-up", measure, lambda x: {"value": x})[1]]

    budgets = rank_values(lambda: _budget(task, config, device))
    if None in budgets:  # a system that does not say
        return replace(config, chunk_size=0)
    memory = partial(memory_of_graph, task, device=device)
    chunk = largest_chunk(lambda n: max(rank_values(lambda: memory(n))), rows, min(budgets))
    return replace(config, chunk_size=chunk)


def _budget(task: Task, config: TrainConfig, device: torch.device) -> float | None:
    """Return the bytes that one chunk may hold on this rank; None on a system that does not report its memory."""
    free = free_memory(device)
    if free is None:
        return None
    if device.type == "cpu":
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks))
    trained = [p for p in task.module.parameters() if p.requires_grad]
    reserved = _PER_WEIGHT * sum(part.nbytes for part in local_parts(trained))
    if is_sharded(task.module):
        reserved += sum(p.nbytes for p in trained)  # FSDP2 holds whole gradients until the last chunk's pass
    return SHARE * (free - reserved)


def largest_chunk(memory: Callable[[int], int], rows: int, budget: float) -> int:
    """Return the largest power of two of rows within the budget; 0 if all rows are.

    A chunk is measured only if twice the memory of the chunk before is within the budget.

    >>> largest_chunk(lambda n: 10 * n, 1000, 700), largest_chunk(lambda n: 10 * n, 40, 700)
    (64, 0)
    """
    chunk, needed = 1, memory(1)
    while chunk < rows:
        if 2 * needed > budget:
            return chunk
        chunk *= 2
        needed = memory(min(chunk, rows))
        if needed > budget:
            return chunk // 2
    return 0


def memory_of_graph(task: Task, rows: int, device: torch.device) -> int:
    """Return the bytes that encoding these first rows of a batch, and going backward, needs on the device.

    On a GPU this is the peak of the allocator. On a CPU it is what the graph holds: nothing for a frozen encoder, which
    has no graph.
    """
    if device.type == "cuda":
        if rows == 1:
            _go_backward(task.encode_rows(1))  # makes the gradients of the weights
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _go_backward(task.encode_rows(rows))
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    weights = {x.untyped_storage()._cdata for x in local_parts(task.module.parameters())}
    held: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory._cdata not in weights:
            held[memory._cdata] = memory
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        features = task.encode_rows(rows)
    total = sum(memory.nbytes() for memory in held.values())  # of whole weights that FSDP2 has freed by now: 0
    if is_sharded(task.module):
        _go_backward(features)  # which ends its collectives
    return total


def _go_backward(x: Tensor) -> None:
    """Go backward from a number, unless all encoders are frozen."""
    if x.requires_grad:
        x.backward()
