"""The two passes over the chunks: their representations, and then forward again with the graph, and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from .._base.graph import leaves_of
from .._base.modules import parameters_in
from .._base.trees import tensors_of
from .._base.warnings import warn
from .chunks import Chunk
from .engines.ddp import DDP, parameters_of_ddp
from .engines.known import Synchronized
from .engines.lost_gradients import watched
from .kept_graphs import Keeper
from .observe import Observer
from .one_pass import NoGraphError, Pairs, backward, difference, encoded_with_graph, switched
from .outer_engine import Enclosing
from .replay import Replay, without_graph


def first_pass(chunks: Sequence[Chunk], keeper: Keeper, observer: Observer) -> None:
    """Compute the representations of all chunks.

    The first chunk of a model always has a graph at first: it shows whether there will be gradients. A representation
    without one is a ValueError, where passes are collective after all of them. Under `torch.no_grad()` there will be
    none, and no chunk has a graph.
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
    chunk.replay = Replay(buffers)
    replayed = chunk.last and any(engine.control.decides == "forward" for engine in encoder.engines)
    trains = torch.is_grad_enabled()
    keeps = trains and not replayed and keeper.wants(encoder.index)
    if keeps or (trains and chunk.first):
        try:
            _encode_with_graph(chunk, keeper, observer, keeps=keeps)
        except Exception as error:
            others_wait = any(engine.control.collective for engine in chunk.engines)
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not out_of_memory or others_wait or not (keeps or any(c.kept for c in chunks)):
                raise
            _free_graphs(chunks, keeper)
            buffers.find_moved()
            chunk.replay.rewind(seen=False)
            chunk.reps = ()
    if chunk.reps and not chunk.kept:
        chunk.forget()
    elif not chunk.reps:
        with without_graph(), _observed(chunk, observer):
            chunk.reps = chunk.encode()
    buffers.find_moved()


def _encode_with_graph(chunk: Chunk, keeper: Keeper, observer: Observer, *, keeps: bool) -> None:
    """Encode the chunk with its graph, and decide whether to keep the graph."""
    encoder = chunk.encoder
    existing = [*encoder.parameters.values(), *tensors_of(chunk.chunk_input.tree)]
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
    with observer.call(encoder.calls, encoder.model, visible=encoder.visible) as engines:
        try:
            yield
        finally:
            chunk.engines = engines or encoder.engines
            encoder.add_parameters(parameters_in(*encoder.calls.modules.values()))


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


def second_pass(
    chunks: Sequence[Chunk],  # of all steps; their encoders have the gradients of the representations
    about_to_change: Callable[[Iterable[Tensor]], None],  # gets the tensors whose gradients come next, if new
    *,
    watch: Callable[[Chunk], bool],  # whether to check that registered engines leave gradients alone in held passes
) -> Exception | None:
    """Go backward through all chunks: those with a graph, then the others, each after its second forward pass.

    Return an error, if a pass has failed, a second representation is not the first, or an engine did not do as asked.
    All passes have been made even then, with zeros where one has failed: engines and other ranks are in the expected
    state, and gradients can be restored. One case is left: where passes are collective, one that fails on one rank
    alone stops the others.
    """
    order = [*(c for c in chunks if c.kept), *(c for c in chunks if not c.kept)]
    last_chunk = {id(engine.module): chunk for chunk in order for engine in chunk.engines}
    in_last_pass = _in_last_pass(order)
    unwatched = {id(engine.module): engine for chunk in order for engine in chunk.engines if watch(chunk)}
    reached = {id(engine.module): dict[int, Tensor]() for chunk in order for engine in _enclosing(chunk)}
    wrong: Exception | None = None
    for chunk in order:
        held = [engine for engine in chunk.engines if last_chunk[id(engine.module)] is not chunk]
        last = [engine for engine in chunk.engines if last_chunk[id(engine.module)] is chunk]
        released = [in_last_pass[id(engine.module)] for engine in last]
        pairs: Pairs = []
        error: Exception | None = None
        if not chunk.kept:
            with switched(held, released):
                error = _encode_again(chunk)
            if not chunk.reps:
                pairs += _zeros_for_engines(last, in_last_pass)
        leaves = leaves_of(chunk.reps)
        about_to_change(leaves)  # an input may have a gradient, too
        grads = [None] * len(chunk.reps) if error is not None else _gradients_of_chunk(chunk)
        pairs += _roots(chunk, grads, whole=bool(last))
        for engine in _enclosing(chunk):
            engine_parameters = {id(p): p for p in leaves or chunk.encoder.leaves if id(p) in engine.parameters}
            reached[id(engine.module)] |= engine_parameters
        observed = [unwatched.pop(id(engine.module)) for engine in held if id(engine.module) in unwatched]
        free = () if chunk.engines or chunk.last or not watch(chunk) else chunk.encoder.leaves
        mistakes = list[ValueError]()
        try:
            with watched(observed, free) as mistakes, switched(held, released):
                backward(pairs, held, last, reached)
        except Exception as failed:
            if any(engine.control.collective for engine in chunk.engines):
                raise
            error = error or failed
        wrong = wrong or error or next(iter(mistakes), None)
        del pairs
        chunk.forget()
    return wrong


@contextmanager
def coalesced(chunks: Iterable[Chunk]) -> Iterator[None]:
    """Make all passes inside. At the end, engines that reduce their sum do so, unless the code inside raises."""
    with ExitStack() as stack:
        for engine in {id(engine.module): engine for chunk in chunks for engine in chunk.engines}.values():
            stack.enter_context(engine.coalesce())
        yield


def _enclosing(chunk: Chunk) -> list[Enclosing]:
    return [engine for engine in chunk.engines if isinstance(engine, Enclosing)]


def _zeros_for_engines(last: Iterable[Synchronized], in_last_pass: Mapping[int, Synchronized]) -> Pairs:
    """Return zeros for all parameters of engines that wait for their gradients in this pass."""
    engines = [engine for engine in last if not isinstance(engine, Enclosing)]
    with switched((), (in_last_pass[id(engine.module)] for engine in engines)), torch.enable_grad():
        ddps: list[Any] = [e.module for e in engines if e.control is DDP]  # which expect a forward pass before
        roots = [x for ddp in ddps for x in ddp._post_forward([p.sum() for _, p in parameters_of_ddp(ddp)])]
    roots += [p for p in parameters_in(*(e.module for e in engines if e.control is not DDP)) if p.requires_grad]
    return [(x, torch.zeros_like(x)) for x in dict.fromkeys(roots)]


def _encode_again(chunk: Chunk) -> Exception | None:
    """Encode the chunk as in the first pass, with a graph; return the error if that fails or differs.

    After a failure, `chunk.reps` is empty.
    """
    first = chunk.reps
    with chunk.replay.again():
        try:
            chunk.reps = encoded_with_graph(chunk)
            return difference(first, chunk.reps, chunk.encoder.name)
        except Exception as error:
            if not chunk.returned and any(engine.control.collective for engine in chunk.engines):
                raise  # in the middle of the engine's communication
            chunk.reps = ()
            return RuntimeError(f"in the second pass, {error}") if isinstance(error, NoGraphError) else error


def _gradients_of_chunk(chunk: Chunk) -> list[Tensor | None]:
    """Return the gradients of the chunk's representations."""
    grads = chunk.encoder.gradients or [None] * len(chunk.reps)
    representations = zip(chunk.reps, grads, chunk.places, strict=True)
    return [None if grad is None else grad[place] if x.dim() else grad for x, grad, place in representations]


def _roots(chunk: Chunk, grads: Sequence[Tensor | None], *, whole: bool) -> Pairs:
    """Return a chunk's representations with their gradients.

    A number of the whole batch, of shape (), has its gradient in the model's last chunk. In the last pass of an engine
    (`whole`), which waits for the gradients of all parameters, a representation without a gradient gets zeros.
    """
    pairs = []
    for x, grad in zip(chunk.reps, grads, strict=True):
        if not x.requires_grad:
            continue
        if grad is not None and (x.dim() or chunk.last):
            pairs.append((x, grad))
        elif x.dim() or whole:
            pairs.append((x, torch.zeros_like(x)))
    return pairs


def _in_last_pass(chunks: Iterable[Chunk]) -> dict[int, Synchronized]:
    """Return each engine as it is in its last pass, by the id of its module.

    It synchronizes there if its caller has left it switched on in any of the calls, as it would without caching.
    """
    engines: dict[int, Synchronized] = {}
    for engine in (engine for chunk in chunks for engine in chunk.engines):
        if id(engine.module) not in engines or engines[id(engine.module)].off:
            engines[id(engine.module)] = engine
    return engines
