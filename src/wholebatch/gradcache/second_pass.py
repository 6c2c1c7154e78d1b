"""The second pass over the chunks: forward again, with the graph, and backward from the representations' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from .._graph import leaves_of
from .chunks import Chunk
from .held import watched
from .one_pass import NoGraphError, difference, encoded_with_graph
from .parameter_sync import Synchronized
from .replay import Buffers

Pairs = list[tuple[Tensor, Tensor]]  # tensors with their gradients


def second_pass(
    chunks: Sequence[Chunk],
    gradients: Sequence[Sequence[Tensor | None]],
    extra: Sequence[tuple[Tensor, Tensor]],
    buffers: Buffers,
    about_to_change: Callable[[Iterable[Tensor]], None],
    *,
    watch: bool = False,
) -> Exception | None:
    """Go backward through all chunks: those with a graph, then the others, each after its second forward pass.

    Args:
        chunks: after the first pass.
        gradients: of each model's representations, all rows.
        extra: parameters of models that the loss used directly, with their gradients: they go into their engine's last
            backward pass.
        buffers: of all models.
        about_to_change: receives the tensors whose gradients come next, where they were not known before.
        watch: whether to check that registered engines leave gradients alone while they are held.

    Returns:
        An error, if a second representation is not the first, or an engine did not do as asked. All passes have been
        made even then: engines and other ranks are in the expected state, and gradients can be restored.
    """
    order = [*(c for c in chunks if c.kept), *(c for c in chunks if not c.kept)]
    last_of_engine = {id(engine.module): chunk for chunk in order for engine in chunk.engines}
    unwatched = {id(engine.module): engine for chunk in order for engine in chunk.engines} if watch else {}
    wrong: Exception | None = None
    for chunk in order:
        engines = chunk.engines
        done = {id(engine.module) for engine in engines if last_of_engine[id(engine.module)] is chunk}
        done_parameters = {
            id(p): p for e in engines if id(e.module) in done for p in e.module.parameters() if p.requires_grad
        }
        pairs: Pairs = [(p, grad) for p, grad in extra if id(p) in done_parameters]
        error: Exception | None = None
        if not chunk.kept:
            error = _encode_again(chunk, buffers, done)
            if not chunk.found:
                pairs += [(p, torch.zeros_like(p)) for p in done_parameters.values()]  # their engine waits for them
            if not chunk.encoder.local:
                about_to_change(leaves_of(chunk.found))
        given = [None] * len(chunk.found) if error is not None else _of_chunk(chunk, gradients)
        pairs += _roots(chunk, given, whole=bool(done))
        pairs += zeros_for_awaited(pairs, (e for e in engines if id(e.module) in done))
        held = [unwatched.pop(id(e.module)) for e in engines if id(e.module) in unwatched.keys() - done]
        with watched(held) as mistakes, _held(engines, but=done):
            backward_from(pairs)
        wrong = wrong or error or next(iter(mistakes), None)
        del pairs
        chunk.forget()
    return wrong


def _encode_again(chunk: Chunk, buffers: Buffers, done: set[int]) -> Exception | None:
    """Encode the chunk as in the first pass, with a graph; return the error if that fails or differs.

    Without a graph, `chunk.found` is empty afterward. Engines are held, except those whose last chunk this is (`done`).
    """
    first = chunk.found
    buffers.set(chunk.before)
    with chunk.replay.again(), _held(chunk.engines, but=done):
        try:
            chunk.found = encoded_with_graph(chunk)
        except NoGraphError as error:
            chunk.found = ()
            return RuntimeError(f"in the second pass, {error}")
        return difference(first, chunk.found, chunk.encoder.name)


def zeros_for_awaited(pairs: Sequence[tuple[Tensor, Tensor]], engines: Iterable[Synchronized]) -> Pairs:
    """Return zeros for the parameters that these engines wait for, and a backward pass from `pairs` does not reach.

    Other chunks may have reached them: two models may be two functions of one engine, each of one of its towers. Their
    gradients exist by then, and are synchronized in this last pass with all others.
    """
    awaited = {id(p): p for e in engines if e.control.awaits is not None for p in e.control.awaits(e.module)}
    if not awaited:
        return []
    roots = [x for x, _ in pairs]
    for p in (*roots, *leaves_of(roots)):
        awaited.pop(id(p), None)
    return [(p, torch.zeros_like(p)) for p in awaited.values()]


def _of_chunk(chunk: Chunk, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Return the gradients of the chunk's representations."""
    of_model = zip(chunk.found, gradients[chunk.encoder.index], chunk.rows, strict=True)
    return [None if grad is None else grad[at] if x.dim() else grad for x, grad, at in of_model]


def _roots(chunk: Chunk, given: Sequence[Tensor | None], *, whole: bool) -> Pairs:
    """Return a chunk's representations with their gradients.

    A number of the whole batch, of shape (), has its gradient in the model's last chunk. In the last pass of an engine
    (`whole`), which waits for the gradients of all parameters, a representation without a gradient gets zeros.
    """
    pairs = []
    for x, grad in zip(chunk.found, given, strict=True):
        if not x.requires_grad:
            continue
        if grad is not None and (x.dim() or chunk.last):
            pairs.append((x, grad))
        elif x.dim() or whole:
            pairs.append((x, torch.zeros_like(x)))
    return pairs


def backward_from(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Run one backward pass from all of these tensors, each with its gradient."""
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


@contextmanager
def _held(engines: Iterable[Synchronized], but: set[int]) -> Iterator[None]:
    """Keep engines from synchronizing gradients inside, except those of the modules in `but`."""
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(nullcontext() if id(engine.module) in but else engine.hold())
        yield
