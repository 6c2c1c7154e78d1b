"""`--chunk-size auto`: the largest chunk whose graph fits into the memory that is free."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..._measure import free_memory
from ..config import TrainConfig
from ..data.load import Data
from ..ranks.all_ranks import on_all_ranks
from .make import make_task
from .task import Task

SHARE = 0.5
"""The part of the free memory that one chunk may hold; the rest is for the loss, for longer texts and for fragments."""
_PER_WEIGHT = 3  # the gradient, and AdamW's two moments, which do not exist yet


def with_chunk_size(config: TrainConfig, data: Data, device: torch.device, *, size: int) -> TrainConfig:
    """Return the configuration with a number of rows as its chunk size. All ranks.

    "auto" becomes the largest power of two whose measured memory fits on every rank, or 0 where all rows of a rank do.

    Args:
        config: the configuration of the run.
        data: its data.
        device: its device.
        size: W, the number of ranks.
    """
    if not config.has_automatic_chunks:
        return config
    rows = -(-config.batch_size // size)

    def found() -> int:
        local = replace(config, chunk_size=0, batch_size=rows, workers=0)
        task = make_task(local, data, device, rank=0, size=1, dense=True)
        free = free_memory(device)
        if free is None:  # a system that does not say
            return 0
        if device.type == "cpu":
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks))
        weights = sum(p.nbytes for p in task.module.parameters() if p.requires_grad)
        return largest_chunk(lambda n: memory_of_graph(task, n, device), rows, SHARE * (free - _PER_WEIGHT * weights))

    _, of_ranks = on_all_ranks("set-up", found, lambda chunk: {"chunk": chunk})
    limited = [each["chunk"] for each in of_ranks if each["chunk"]]
    return replace(config, chunk_size=min(limited, default=0))


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

    On a GPU this is the peak of the allocator. On a CPU it is what the graph holds.
    """
    if device.type == "cuda":
        if rows == 1:
            task.encode_rows(1).backward()  # makes the gradients of the weights
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        task.encode_rows(rows).backward()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    seen = {x.untyped_storage().data_ptr() for x in task.module.parameters()}
    total = 0

    def count(x: Tensor) -> Tensor:
        nonlocal total
        memory = x.untyped_storage()
        if memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            total += memory.nbytes()
        return x

    with saved_tensors_hooks(count, lambda x: x):
        held = task.encode_rows(rows)
    del held
    return total
