"""The two passes over chunks of a batch, and the gradient of representations between them.

    first pass     r_c = encode(x_c), chunk by chunk, without a graph (or with one that is kept)
    loss           L(r), g = dL/dr, of all representations at once
    second pass    r_c once more, with its graph, and its backward pass from g_c

    dL/dtheta = sum_c (dr_c/dtheta)^T g_c

At no time is there more than one chunk's graph, besides those that are kept. The sum is that of autograd over the whole
batch, so that nothing is approximated; the second r_c must be the first (see `replay`), which is looked at.

Engines synchronise in the last backward pass of their module, and these come in the order of the models on every rank,
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
from .inputs import tensors_of
from .keep import Keeper
from .parameter_sync import Synchronised, modules_of, synchronised, watched
from .replay import Buffers, Replay, fresh_autocast_cache


class Encoder:
    """A model of a step.

    Args:
        model: a module, or a function of some.
        index: which of the step's models.
        name: for messages.
    """

    def __init__(self, model: Callable[..., Any], index: int, name: str) -> None:
        self.model, self.index, self.name = model, index, name
        self.modules = modules_of(model)
        self.engines = synchronised(self.modules)  # those of a function, until it was called: all that it can see
        self.certain = synchronised(x for x in (model, getattr(model, "__self__", None)) if isinstance(x, nn.Module))
        self.single = True  # whether its representation is a tensor, and not a tuple of them
        self.parameters: list[Tensor] = [p for module in self.modules for p in module.parameters()]

    @contextmanager
    def first_call(self) -> Iterator[None]:
        """Inside, the model is called for the first time: its engines are then those that this has called."""
        certain = {id(engine.module) for engine in self.certain}
        with watched([engine for engine in self.engines if id(engine.module) not in certain]) as called:
            yield
        also = {id(engine.module): engine for engine in called}
        self.engines = [*self.certain, *also.values()]


@dataclass(eq=False)
class Chunk:
    """Some rows of a model's batch.

    Args:
        encoder: of the model.
        encode: the pass: the representations of these rows.
        part: what it is given, a tree of tensors.
        first: whether it is the model's first chunk.
    """

    encoder: Encoder
    encode: Callable[[], tuple[Tensor, ...]]
    part: Any
    first: bool
    replay: Replay = field(init=False)
    before: list[Tensor] = field(default_factory=list)  # the state of the buffers that the pass found
    found: tuple[Tensor, ...] = ()
    rows: list[slice] = field(default_factory=list)  # where they lie among the model's, for each representation
    kept: bool = False  # found has its graph

    def forget(self) -> None:
        """Let go of the graph."""
        self.kept, self.found = False, tuple(x.detach() for x in self.found)


def first_pass(chunks: Sequence[Chunk], keeper: Keeper, buffers: Buffers) -> None:
    """Find the representations of all chunks.

    The first chunk of a model has a graph for a moment in any case: that shows whether there will be gradients.

    Raises:
        ValueError: if a representation would have none.
    """
    last = {chunk.encoder.index: chunk for chunk in chunks}
    for chunk in chunks:
        encoder = chunk.encoder
        chunk.replay, chunk.before = Replay(), buffers.now()
        replayed = last[encoder.index] is chunk and any(e.control.decides == "forward" for e in encoder.engines)
        wanted = not replayed and keeper.wants(encoder.index)
        if wanted or chunk.first:
            try:
                there = [*encoder.parameters, *tensors_of(chunk.part)]
                calls = encoder.first_call() if chunk.first else nullcontext()
                with keeper.measured(encoder.index, there), _held(encoder.engines), calls:
                    chunk.found = with_graph(chunk.encode, encoder.name)
                if not encoder.modules:
                    encoder.parameters = leaves_of(chunk.found)
                chunk.kept = wanted and keeper.kept(encoder.index)
            except Exception as error:
                others_wait = any(engine.control.collective for engine in encoder.engines)
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
            with torch.no_grad(), fresh_autocast_cache(), _held(encoder.engines):
                chunk.found = chunk.encode()
        buffers.look()


def second_pass(
    chunks: Sequence[Chunk],
    gradients: Sequence[Sequence[Tensor | None]],
    extra: Sequence[tuple[Tensor, Tensor]],
    buffers: Buffers,
) -> RuntimeError | None:
    """Backward through all chunks: those with a graph, then the others, each after its second forward pass.

    Args:
        chunks: after the first pass.
        gradients: of each model's representations, all rows.
        extra: parameters of models that the loss used directly, with their gradients: they go into their engine's last
            backward pass.
        buffers: of all models.

    Returns:
        An error, if a second representation is not the first. All passes have been made even so: engines and other
        ranks are where they should be, and gradients can be put back.
    """
    order = [*(c for c in chunks if c.kept), *(c for c in chunks if not c.kept)]
    last_of_engine, last_of_model = _last_of_engines(order), {id(c.encoder.model): c for c in order}
    wrong = None
    for chunk in order:
        engines = chunk.encoder.engines
        done = {id(engine.module) for engine in engines if last_of_engine[id(engine.module)] is chunk}
        if not chunk.kept:
            first = chunk.found
            buffers.set(chunk.before)
            with chunk.replay.again(), _held(engines, but=done):
                chunk.found = with_graph(chunk.encode, chunk.encoder.name)
            wrong = wrong or difference(first, chunk.found, chunk.encoder.name)
        pairs = _roots(chunk, chunks, gradients, last=last_of_model[id(chunk.encoder.model)] is chunk)
        owned = {id(p) for e in engines if id(e.module) in done for p in e.module.parameters()}
        pairs += [(p, grad) for p, grad in extra if id(p) in owned]
        with _held(engines, but=done):
            backward_from(pairs)
        del pairs
        chunk.forget()
    return wrong


def _roots(
    chunk: Chunk, chunks: Sequence[Chunk], gradients: Sequence[Sequence[Tensor | None]], *, last: bool
) -> list[tuple[Tensor, Tensor]]:
    """A chunk's representations with their gradients; the last of a model's has those of the whole batch's numbers."""
    pairs = []
    for number, (x, grad, rows) in enumerate(zip(chunk.found, gradients[chunk.encoder.index], chunk.rows, strict=True)):
        if x.dim() and grad is not None:
            pairs.append((x, grad[rows]))
        elif not x.dim() and last:
            same = {c.encoder.index for c in chunks if c.encoder.model is chunk.encoder.model}
            pairs += [(x, of) for k in same if (of := gradients[k][number]) is not None]
    return pairs


def backward_from(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """One backward pass from all of these tensors, each with its gradient."""
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


def with_graph(encode: Callable[[], tuple[Tensor, ...]], name: str) -> tuple[Tensor, ...]:
    """A pass whose representations have gradients.

    Raises:
        ValueError: if one has none.
    """
    with torch.enable_grad(), fresh_autocast_cache():
        found = encode()
    for number, x in enumerate(found):
        if differentiable(x) and not x.requires_grad:
            raise ValueError(
                f"representation {number} of {name} has no gradient: is the model frozen, its output detached, or this "
                "inference mode? What is not trained goes to the loss as a keyword argument"
            )
    return found


def differentiable(x: Tensor) -> bool:
    """Whether a tensor of this type can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def difference(first: Sequence[Tensor], second: Sequence[Tensor], name: str) -> RuntimeError | None:
    """The error, if the second pass's representations are not the first's, up to a kernel's order of summation."""
    for number, (x, y) in enumerate(zip(first, second, strict=True)):
        y = y.detach()
        if x.shape == y.shape and (torch.equal(x, y) or not differentiable(x) or not x.isfinite().all()):
            continue
        away, size = float("nan"), torch.linalg.vector_norm(x).item()
        if x.shape == y.shape:
            away = torch.linalg.vector_norm(x - y).item()
        if not away <= torch.finfo(x.dtype).eps ** 0.5 * size:
            return RuntimeError(
                f"the second forward pass of {name} gave another representation {number} than the first (they differ "
                f"by {away:.1e} of {size:.1e}): the gradient would be wrong. Random numbers of PyTorch, Python and "
                "NumPy and registered buffers are set back; does it change a tensor or a number of its own?"
            )
    return None


def _last_of_engines(chunks: Iterable[Chunk]) -> dict[int, Chunk]:
    """By module, the last chunk of an engine's."""
    return {id(engine.module): chunk for chunk in chunks for engine in chunk.encoder.engines}


@contextmanager
def _held(engines: Iterable[Synchronised], but: set[int] | None = None) -> Iterator[None]:
    """No gradients are synchronised, but for those of some modules."""
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
        stacklevel=2,
    )
