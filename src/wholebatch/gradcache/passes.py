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
from .one_pass import NoGraphError, Pairs, backward, difference, encoded_with_graph, hidden_backward
from .outer_engine import Enclosing
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
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not out_of_memory or others_wait or not (keeps or any(c.kept for c in chunks)):
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
    with observer.call(encoder.model, visible=encoder.visible) as called:
        try:
            yield
        finally:
            chunk.engines = called.engines or encoder.engines
            encoder.add_called(called)


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
    chunks: Sequence[Chunk],
    about_to_change: Callable[[Iterable[Tensor]], None],
    *,
    watch: Callable[[Chunk], bool] = lambda _chunk: False,
) -> Exception | None:
    """Go backward through all chunks: those with a graph, then the others, each after its second forward pass.

    Args:
        chunks: of all steps, after their first passes; their encoders have the gradients of the representations.
        about_to_change: receives the tensors whose gradients come next, where they were not known before.
        watch: whether to check, in the passes of a chunk, that registered engines leave gradients alone while they are
            held.

    Returns:
        An error, if a pass has failed, a second representation is not the first, or an engine did not do as asked. All
        passes have been made even then, with zeros where one has failed: engines and other ranks are in the expected
        state, and gradients can be restored. One case is left: where passes are collective, one that fails on one
        rank alone stops the others.
    """
    order = [*(c for c in chunks if c.kept), *(c for c in chunks if not c.kept)]
    last_of_engine = {id(engine.module): chunk for chunk in order for engine in chunk.engines}
    release = _releases(order)
    unwatched = {id(engine.module): engine for chunk in order for engine in chunk.engines if watch(chunk)}
    reached = {id(engine.module): dict[int, Tensor]() for chunk in order for engine in _enclosing(chunk)}
    wrong: Exception | None = None
    for chunk in order:
        engines = chunk.engines
        done = {id(engine.module) for engine in engines if last_of_engine[id(engine.module)] is chunk}
        pairs: Pairs = []
        error: Exception | None = None
        if not chunk.kept:
            error = _encode_again(chunk, done, release)
            if not chunk.reps:
                pairs += _zeros_for_engines(chunk, done, release)
        leaves = leaves_of(chunk.reps)
        about_to_change(leaves)  # an input may have a gradient, too
        grads = [None] * len(chunk.reps) if error is not None else _gradients_of_chunk(chunk)
        pairs += _roots(chunk, grads, whole=bool(done))
        for engine in _enclosing(chunk):
            of_engine = {id(p): p for p in leaves or chunk.encoder.leaves if id(p) in engine.parameters}
            reached[id(engine.module)] |= of_engine
        held = [unwatched.pop(id(e.module)) for e in engines if id(e.module) in unwatched.keys() - done]
        free = () if engines or chunk.last or not watch(chunk) else chunk.encoder.leaves
        mistakes = list[ValueError]()
        try:
            with watched(held, free) as mistakes, _held(engines, done, release):
                if any(engine.hides and id(engine.module) not in done for engine in engines):
                    hidden_backward(pairs)
                else:
                    backward(pairs, [e for e in engines if id(e.module) in done], reached)
        except Exception as failed:
            if any(engine.control.collective for engine in engines):
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


def _zeros_for_engines(chunk: Chunk, done: set[int], release: Mapping[int, Synchronized]) -> Pairs:
    """Return zeros for all parameters of the engines of the modules in `done`, which wait for their gradients."""
    last = [e for e in chunk.engines if id(e.module) in done and not isinstance(e, Enclosing)]
    with _held(last, done, release), torch.enable_grad():
        ddps: list[Any] = [e.module for e in last if e.control is DDP]  # which expect a forward pass before
        roots = [x for ddp in ddps for x in ddp._post_forward([p.sum() for _, p in parameters_of_ddp(ddp)])]
    roots += [p for p in parameters_in(*(e.module for e in last if e.control is not DDP)) if p.requires_grad]
    return [(x, torch.zeros_like(x)) for x in dict.fromkeys(roots)]


def _encode_again(chunk: Chunk, done: set[int], release: Mapping[int, Synchronized]) -> Exception | None:
    """Encode the chunk as in the first pass, with a graph; return the error if that fails or differs.

    After a failure, `chunk.reps` is empty. Engines are held, except those whose last chunk this is (`done`).
    """
    first = chunk.reps
    chunk.encoder.buffers.set(chunk.before)
    with chunk.replay.again(), _held(chunk.engines, done, release):
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
    of_model = zip(chunk.reps, grads, chunk.places, strict=True)
    return [None if grad is None else grad[place] if x.dim() else grad for x, grad, place in of_model]


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


def _releases(chunks: Iterable[Chunk]) -> dict[int, Synchronized]:
    """Return each engine as it is in its last pass, by the id of its module.

    It synchronizes there if its caller has left it switched on in any of the calls, as it would without caching.
    """
    releases: dict[int, Synchronized] = {}
    for engine in (engine for chunk in chunks for engine in chunk.engines):
        if id(engine.module) not in releases or releases[id(engine.module)].off:
            releases[id(engine.module)] = engine
    return releases


@contextmanager
def _held(engines: Iterable[Synchronized], done: set[int], release: Mapping[int, Synchronized]) -> Iterator[None]:
    """Keep engines from synchronizing gradients inside, except those of the modules in `done` in their last pass."""
    with ExitStack() as stack:
        for engine in engines:
            key = id(engine.module)
            stack.enter_context(release[key].release() if key in done else engine.hold())
        yield
