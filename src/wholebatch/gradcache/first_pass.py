"""The first pass over the chunks: their representations, without a graph or with one that is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .._base.graph import leaves_of
from .._base.trees import tensors_of
from .._base.warnings import warn
from .chunks import Chunk
from .kept_graphs import Keeper
from .observe import Observer
from .one_pass import encoded_with_graph
from .replay import Replay, without_graph


def first_pass(chunks: Sequence[Chunk], keeper: Keeper, observer: Observer) -> None:
    """Compute the representations of all chunks.

    The first chunk of a model always has a graph at first: it shows whether there will be gradients. Under
    `torch.no_grad()` there will be none, and no chunk has a graph.

    Raises:
        ValueError: if a representation would have none. Where passes are collective, after all of them.
    """
    wrong: Exception | None = None
    for chunk in chunks:
        try:
            _encode(chunk, chunks, keeper, observer)
        except Exception as error:
            if not (chunk.returned and any(engine.control.collective for engine in chunk.engines)):
                raise
            wrong = wrong or error
    if wrong is not None:
        raise wrong


def _encode(chunk: Chunk, chunks: Sequence[Chunk], keeper: Keeper, observer: Observer) -> None:
    encoder, buffers = chunk.encoder, observer.buffers
    chunk.replay, chunk.before = Replay(), buffers.now()
    replayed = chunk.last and any(engine.control.decides == "forward" for engine in encoder.engines)
    trains = torch.is_grad_enabled()
    keeps = trains and not replayed and keeper.wants(encoder.index)
    if keeps or (trains and chunk.first):
        try:
            _encode_with_graph(chunk, keeper, observer, keeps=keeps)
        except Exception as error:
            others_wait = any(engine.control.collective for engine in chunk.engines)
            if not _out_of_memory(error) or others_wait or not (keeps or any(c.kept for c in chunks)):
                raise
            _free_graphs(chunks, keeper)
            buffers.find_moved()
            buffers.replace(chunk.before)
            chunk.reps = ()
            chunk.replay.rewind()
    if chunk.reps and not chunk.kept:
        chunk.forget()
    elif not chunk.reps:
        with without_graph(), _observed(chunk, observer):
            chunk.reps = chunk.encode()
    buffers.find_moved()


def _encode_with_graph(chunk: Chunk, keeper: Keeper, observer: Observer, *, keeps: bool) -> None:
    """Encode the chunk with its graph, and decide whether to keep the graph."""
    encoder = chunk.encoder
    existing = [*encoder.parameters.values(), *tensors_of(chunk.part)]
    with keeper.measured(encoder.index, existing), _observed(chunk, observer):
        chunk.reps = encoded_with_graph(chunk)
    if chunk.first:
        encoder.leaves = leaves_of(chunk.reps)
    if not encoder.local:
        encoder.add_parameters(encoder.leaves if chunk.first else leaves_of(chunk.reps))
    replayed = chunk.last and any(engine.control.decides == "forward" for engine in chunk.engines)
    chunk.kept = keeps and not replayed and keeper.kept(encoder.index)


@contextmanager
def _observed(chunk: Chunk, observer: Observer) -> Iterator[None]:
    """Observe the first call of the chunk's model in this context: hold and record the engines that it calls."""
    encoder = chunk.encoder
    with observer.call(encoder.model, visible=encoder.visible) as called:
        try:
            yield
        finally:
            chunk.engines = called.engines or encoder.engines
            encoder.add_called(called)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _free_graphs(chunks: Sequence[Chunk], keeper: Keeper) -> None:
    """Free half of the kept graphs and keep no more, to make room for the rest of the step."""
    kept = [chunk for chunk in chunks if chunk.kept]
    for chunk in kept[len(kept) // 2 :]:
        chunk.forget()
    keeper.stop()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    warn(
        f"gradient caching: out of memory with {len(kept)} kept graphs; going on with {len(kept) // 2} in this step, "
        f"keep_graphs={len(kept) // 2} avoids the attempt",
        RuntimeWarning,
    )
