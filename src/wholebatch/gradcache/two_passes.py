"""The two passes over chunks of a batch, and the gradient of representations between them.

    first pass     r_c = encode(x_c), chunk by chunk, without a graph (or with one that is kept)
    loss           L(r), g = dL/dr, of all representations at once
    second pass    r_c once more, with its graph, and its backward pass from g_c

    dL/dtheta = sum_c (dr_c/dtheta)^T g_c

At no time is there more than one chunk's graph, besides those that are kept. The sum is that of autograd over the whole
batch, so that nothing is approximated; the second r_c must be the first (see `replay`), which is looked at.

Engines synchronize in the last backward pass of their module, and these come in the order of the models on every rank,
whatever each rank keeps: kept graphs have theirs before, and where an engine decides in the forward pass, no graph of a
model's last chunk is kept, since between that forward pass and its backward pass there must be no other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._graph import leaves_of
from .held import watched
from .inputs import tensors_of
from .keep import Keeper
from .observe import Called, Observer
from .parameter_sync import Synchronized, modules_of, synchronized
from .replay import Buffers, Replay, fresh_autocast_cache, without_graph


class NoGraphError(ValueError):
    """A representation that was to have a gradient has none."""


class Encoder:
    """A model of a step.

    Args:
        model: a module, or a function of some.
        index: which of the step's models.
        name: for messages.
    """

    def __init__(self, model: Callable[..., Any], index: int, name: str) -> None:
        self.model, self.index, self.name = model, index, name
        local = [x for x in (model, getattr(model, "__self__", None)) if isinstance(x, nn.Module)]
        self.local = local[:1]  # the module that it is, or is a method of
        self.visible = modules_of(model)  # looked for once: its calls are many
        self.engines = synchronized(self.local)  # if calls show none
        self.form: Callable[[Sequence[Any]], Any] = tuple  # of its representations
        self.trained: list[bool] = []  # which of them have a gradient
        self.parameters: dict[int, Tensor] = {id(p): p for module in self.local for p in module.parameters()}
        self.called: dict[int, nn.Module] = {}  # the outermost modules, whose parameters are the model's
        self.seen: dict[int, nn.Module] = {}  # these, and inner ones, as far as a hook has seen their calls
        self.synchronized: dict[int, Synchronized] = {}  # engines that were called
        self.leaves: list[Tensor] = []  # of the graph of the first chunk

    def add_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Take these for the model's."""
        self.parameters |= {id(x): x for x in tensors}

    def add_called(self, called: Called) -> None:
        """Take what a call has called for the model's."""
        self.called |= {id(module): module for module in called.modules}
        self.seen |= called.seen
        self.synchronized |= {id(engine.module): engine for engine in called.engines}
        self.add_parameters(p for module in called.modules for p in module.parameters())


@dataclass(eq=False)
class Chunk:
    """Some rows of a model's batch.

    Args:
        encoder: of the model.
        call: the model, on these rows.
        read: the representations in what it gives.
        part: what it is given, a tree of tensors.
        first, last: whether it is the model's first chunk, its last one.
    """

    encoder: Encoder
    call: Callable[[], Any]
    read: Callable[[Any], tuple[Tensor, ...]]
    part: Any
    first: bool
    last: bool = False
    replay: Replay = field(init=False)
    before: list[Tensor] = field(default_factory=list)  # the state of the buffers that the pass found
    engines: list[Synchronized] = field(default_factory=list)  # that the pass has called
    found: tuple[Tensor, ...] = ()
    rows: list[slice] = field(default_factory=list)  # where they lie among the model's, for each representation
    kept: bool = False  # found has its graph
    called: bool = False  # the model has come to its end, whatever comes of what it gave

    def encode(self) -> tuple[Tensor, ...]:
        """The pass."""
        self.called = False
        out = self.call()
        self.called = True
        return self.read(out)

    def forget(self) -> None:
        """Let go of the graph."""
        self.kept, self.found = False, tuple(x.detach() for x in self.found)


def first_pass(chunks: Sequence[Chunk], keeper: Keeper, observer: Observer) -> None:
    """Find the representations of all chunks.

    The first chunk of a model has a graph for a moment in any case: that shows whether there will be gradients.

    Raises:
        ValueError: if a representation would have none. Where passes are collective, after all of them.
    """
    wrong: Exception | None = None
    for chunk in chunks:
        try:
            _first_pass(chunk, chunks, keeper, observer)
        except Exception as error:
            if not (chunk.called and any(engine.control.collective for engine in chunk.engines)):
                raise
            wrong = wrong or error
    if wrong is not None:
        raise wrong


def _first_pass(chunk: Chunk, chunks: Sequence[Chunk], keeper: Keeper, observer: Observer) -> None:
    encoder, buffers = chunk.encoder, observer.buffers
    chunk.replay, chunk.before = Replay(), buffers.now()
    replayed = chunk.last and any(engine.control.decides == "forward" for engine in encoder.engines)
    wanted = not replayed and keeper.wants(encoder.index)
    if wanted or chunk.first:
        try:
            there = [*encoder.parameters.values(), *tensors_of(chunk.part)]
            with keeper.measured(encoder.index, there), _observed(chunk, observer):
                chunk.found = _with_graph(chunk)
            if chunk.first:
                encoder.leaves = leaves_of(chunk.found)
            if not encoder.local:
                encoder.add_parameters(encoder.leaves if chunk.first else leaves_of(chunk.found))
            decided = chunk.last and any(engine.control.decides == "forward" for engine in chunk.engines)
            chunk.kept = wanted and not decided and keeper.kept(encoder.index)
        except Exception as error:
            others_wait = any(engine.control.collective for engine in chunk.engines)
            if not _out_of_memory(error) or others_wait or not (wanted or any(c.kept for c in chunks)):
                raise
            _give_up_graphs(chunks, keeper)
            buffers.look()
            buffers.replace(chunk.before)
            chunk.found = ()
            chunk.replay.rewind()
    if chunk.found and not chunk.kept:
        chunk.forget()
    elif not chunk.found:
        with without_graph(), _observed(chunk, observer):
            chunk.found = chunk.encode()
    buffers.look()


@contextmanager
def _observed(chunk: Chunk, observer: Observer) -> Iterator[None]:
    """Inside, the chunk's model is called for the first time, and held; afterward it is known what it called."""
    encoder = chunk.encoder
    with observer.call(encoder.model, visible=encoder.visible) as called:
        try:
            yield
        finally:
            chunk.engines = called.engines or encoder.engines
            encoder.add_called(called)


def second_pass(
    chunks: Sequence[Chunk],
    gradients: Sequence[Sequence[Tensor | None]],
    extra: Sequence[tuple[Tensor, Tensor]],
    buffers: Buffers,
    about_to_change: Callable[[Iterable[Tensor]], None],
    *,
    watch: bool = False,
) -> Exception | None:
    """Backward through all chunks: those with a graph, then the others, each after its second forward pass.

    Args:
        chunks: after the first pass.
        gradients: of each model's representations, all rows.
        extra: parameters of models that the loss used directly, with their gradients: they go into their engine's last
            backward pass.
        buffers: of all models.
        about_to_change: is told whose gradients come next, where they were not known before.
        watch: whether to check that registered engines leave gradients alone while they are held.

    Returns:
        An error, if a second representation is not the first, or an engine did not do what it was told. All passes have
        been made even so: engines and other ranks are where they should be, and gradients can be put back.
    """
    order = [*(c for c in chunks if c.kept), *(c for c in chunks if not c.kept)]
    last_of_engine = _last_of_engines(order)
    wrong: Exception | None = None
    unwatched = {id(engine.module): engine for chunk in order for engine in chunk.engines} if watch else {}
    for chunk in order:
        engines = chunk.engines
        done = {id(engine.module) for engine in engines if last_of_engine[id(engine.module)] is chunk}
        given = [None if grad is None else grad[at] if x.dim() else grad for x, grad, at in _of_chunk(chunk, gradients)]
        owned = {id(p): p for e in engines if id(e.module) in done for p in e.module.parameters() if p.requires_grad}
        pairs = [(p, grad) for p, grad in extra if id(p) in owned]
        if not chunk.kept:
            first = chunk.found
            buffers.set(chunk.before)
            with chunk.replay.again(), _held(engines, but=done):
                try:
                    chunk.found = _with_graph(chunk)
                    different = difference(first, chunk.found, chunk.encoder.name)
                except NoGraphError as error:
                    chunk.found, different = (), RuntimeError(f"in the second pass, {error}")
                    pairs += [(p, torch.zeros_like(p)) for p in owned.values()]  # their engine waits for them
            if different is not None:
                wrong, given = wrong or different, [None] * len(chunk.found)
            if not chunk.encoder.local:
                about_to_change(leaves_of(chunk.found))
        pairs += _roots(chunk, given, whole=bool(done))
        pairs += zeros_for_awaited(pairs, (e for e in engines if id(e.module) in done))
        held = [unwatched.pop(id(e.module)) for e in engines if id(e.module) in unwatched.keys() - done]
        with watched(held) as mistakes, _held(engines, but=done):
            backward_from(pairs)
        wrong = wrong or next(iter(mistakes), None)
        del pairs
        chunk.forget()
    return wrong


def zeros_for_awaited(
    pairs: Sequence[tuple[Tensor, Tensor]], engines: Iterable[Synchronized]
) -> list[tuple[Tensor, Tensor]]:
    """Zeros for the parameters that these engines wait for, and a backward pass from `pairs` does not come to.

    Other chunks may have come to them: two models that are two functions of one engine, each of one of its towers.
    Their gradients are there by then, and are synchronized in this last pass with all others.
    """
    awaited = {id(p): p for e in engines if e.control.awaits is not None for p in e.control.awaits(e.module)}
    if not awaited:
        return []
    roots = [x for x, _ in pairs]
    for p in (*roots, *leaves_of(roots)):
        awaited.pop(id(p), None)
    return [(p, torch.zeros_like(p)) for p in awaited.values()]


def _of_chunk(
    chunk: Chunk, gradients: Sequence[Sequence[Tensor | None]]
) -> Iterator[tuple[Tensor, Tensor | None, slice]]:
    return zip(chunk.found, gradients[chunk.encoder.index], chunk.rows, strict=True)


def _roots(chunk: Chunk, given: Sequence[Tensor | None], *, whole: bool) -> list[tuple[Tensor, Tensor]]:
    """A chunk's representations with their gradients.

    A number of the whole batch, of shape (), has its gradient in the model's last chunk. In the last pass of an engine
    (`whole`), which waits for the gradients of all parameters, what has none gets zeros.
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
    """One backward pass from all of these tensors, each with its gradient."""
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


def with_graph(encode: Callable[[], tuple[Tensor, ...]], name: str) -> tuple[Tensor, ...]:
    """A pass with its graph.

    Raises:
        NoGraphError: if nothing that it returns has a gradient.
    """
    with torch.enable_grad(), fresh_autocast_cache():
        found = encode()
    if not any(x.requires_grad for x in found):
        raise NoGraphError(
            f"what {name} returns has no gradient: is it frozen, its output detached, or this inference mode? "
            "What is not trained goes to the loss as a keyword argument"
        )
    return found


def _with_graph(chunk: Chunk) -> tuple[Tensor, ...]:
    """The same of a chunk; its model's first such pass says which representations have a gradient."""
    encoder = chunk.encoder
    found = with_graph(chunk.encode, encoder.name)
    encoder.trained = encoder.trained or [x.requires_grad for x in found]
    for number, (x, trained) in enumerate(zip(found, encoder.trained, strict=False)):
        if trained and not x.requires_grad:
            raise NoGraphError(f"representation {number} of {encoder.name} has a gradient in some chunks, not in all")
    return found


def differentiable(x: Tensor) -> bool:
    """Whether a tensor of this type can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def difference(first: Sequence[Tensor], second: Sequence[Tensor], name: str) -> RuntimeError | None:
    """The error, if the second pass's representations are not the first's, up to a kernel's order of summation.

    They may differ by sqrt(eps) of their norm, in half precision by 4 eps.
    """
    what = None
    if [x.shape for x in first] != [x.shape for x in second]:
        what = f"shapes {[tuple(x.shape) for x in second]}, and the first {[tuple(x.shape) for x in first]}"
    else:
        for number, (x, y) in enumerate(zip(first, second, strict=True)):
            y = y.detach()
            if torch.equal(x, y) or not differentiable(x) or not x.isfinite().all():
                continue
            away, size = torch.linalg.vector_norm(x - y).item(), torch.linalg.vector_norm(x).item()
            eps = torch.finfo(x.dtype).eps
            if not away <= min(eps**0.5, 4 * eps if x.dtype.itemsize == 2 else 1.0) * size:
                what = f"another representation {number} than the first (they differ by {away:.1e} of {size:.1e})"
                break
    if what is None:
        return None
    return RuntimeError(
        f"the second forward pass of {name} gave {what}: the gradient would be wrong. "
        "Random numbers of PyTorch, Python and NumPy and registered buffers are set back; does it change a tensor or a "
        "number of its own?"
    )


def _last_of_engines(chunks: Iterable[Chunk]) -> dict[int, Chunk]:
    """By module, the last chunk of an engine's."""
    return {id(engine.module): chunk for chunk in chunks for engine in chunk.engines}


@contextmanager
def _held(engines: Iterable[Synchronized], but: set[int] | None = None) -> Iterator[None]:
    """No gradients are synchronized, but for those of some modules."""
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(nullcontext() if id(engine.module) in (but or set()) else engine.hold())
        yield


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _give_up_graphs(chunks: Sequence[Chunk], keeper: Keeper) -> None:
    """Half of those that are kept, so that the rest of the step has room."""
    kept = [chunk for chunk in chunks if chunk.kept]
    for chunk in kept[len(kept) // 2 :]:
        chunk.forget()
    keeper.stop()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    warnings.warn(
        f"gradient caching: out of memory with {len(kept)} kept graphs; going on with {len(kept) // 2} in this step, "
        f"keep_graphs={len(kept) // 2} avoids the attempt",
        RuntimeWarning,
        stacklevel=6,  # the caller of cache_step
    )
