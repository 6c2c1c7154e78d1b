"""The two passes over chunks of a batch, and the gradient of representations between them.

    first pass     r_c = encode(x_c), chunk by chunk, without a graph (or with one that is kept)
    loss           L(r), g = dL/dr, of all representations at once
    second pass    r_c once more, with its graph, and its backward pass from g_c

    dL/dtheta = sum_c (dr_c/dtheta)^T g_c

At no time is there more than one chunk's graph, besides those that are kept. The sum is that of autograd over the whole
batch, so that nothing is approximated; the second r_c must be the first (see `replay`), which is looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import tensors_of
from .keep import Keeper
from .parameter_sync import Synchronised, synchronised
from .replay import Buffers, Replay, fresh_autocast_cache


class Encoder:
    """A model of a step.

    Args:
        model: a module, or a function.
        index: which of the step's models.
        name: for messages.
    """

    def __init__(self, model: Callable[..., Any], index: int, name: str) -> None:
        self.model, self.index, self.name = model, index, name
        self.buffers = Buffers([model])
        self.engines = synchronised(model)
        self.single = True  # whether its representation is a tensor, and not a tuple of them
        self.parameters: list[Tensor] = [*model.parameters()] if isinstance(model, nn.Module) else []


@dataclass
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
    replay: Replay = field(default_factory=Replay)
    before: list[Tensor] = field(default_factory=list)  # the buffers that the pass moves, as it found them
    found: tuple[Tensor, ...] = ()
    rows: list[slice] = field(default_factory=list)  # where they lie among the model's, for each representation
    kept: bool = False  # found has its graph

    def forget(self) -> None:
        """Let go of the graph."""
        self.kept, self.found = False, tuple(x.detach() for x in self.found)


def first_pass(chunks: Sequence[Chunk], keeper: Keeper) -> None:
    """Find the representations of all chunks.

    The first chunk of a model has a graph for a moment in any case: that shows whether there will be gradients.

    Raises:
        ValueError: if a representation would have none.
    """
    last = _last_of_engines(chunks)
    for chunk in chunks:
        encoder = chunk.encoder
        chunk.replay, before = Replay(), encoder.buffers.now()
        wanted = keeper.wants(encoder.index)
        if wanted or chunk.first:
            # What decides in the forward pass synchronises in this one, if there will be no other for its last chunk.
            whole = {
                id(engine.module)
                for engine in encoder.engines
                if wanted
                and last[id(engine.module)] is chunk
                and all(c.kept for c in chunks if c is not chunk and _uses(c, engine))
            }
            try:
                with (
                    keeper.measured(encoder.index, [*encoder.parameters, *tensors_of(chunk.part)]),
                    _held(encoder.engines, but=whole),
                ):
                    chunk.found = _with_graph(chunk)
                if not isinstance(encoder.model, nn.Module):
                    encoder.parameters = leaves_of(chunk.found)
                chunk.kept = wanted and (keeper.kept(encoder.index) or bool(whole))
            except Exception as error:
                others_wait = any(engine.control.collective for engine in encoder.engines)
                if not _out_of_memory(error) or others_wait or not (wanted or any(c.kept for c in chunks)):
                    raise
                _give_up_graphs(chunks, keeper)
                chunk.found = ()
                chunk.replay.rewind()
                encoder.buffers.set(before)
        if not chunk.kept:
            if chunk.found:
                chunk.forget()
            else:
                with torch.no_grad(), fresh_autocast_cache(), _held(encoder.engines):
                    chunk.found = chunk.encode()
        chunk.before = encoder.buffers.compare(before)


def second_pass(
    chunks: Sequence[Chunk],
    gradients: Sequence[Sequence[Tensor | None]],
    extra: Sequence[tuple[Tensor, Tensor]],
    agree: Callable[[Callable[[], None]], object],
) -> None:
    """Backward through all chunks: those with a graph, then the others, each after its second forward pass.

    Args:
        chunks: after the first pass.
        gradients: of each model's representations, all rows.
        extra: parameters of models that the loss used directly, with their gradients: they go into their engine's last
            backward pass.
        agree: calls a function, and makes what it raises an error of all ranks: all that comes before engines
            synchronise, so that none waits for a rank that has failed.

    Raises:
        RuntimeError: if a second representation is not the first.
    """
    kept, replayed = [c for c in chunks if c.kept], [c for c in chunks if not c.kept]
    order = [*kept, *replayed]
    last_of_engine, last_of_model = _last_of_engines(order), {id(c.encoder.model): c for c in order}
    engines = {id(engine.module): engine for c in chunks for engine in c.encoder.engines}

    def roots(chunk: Chunk) -> list[tuple[Tensor, Tensor]]:
        of_chunk, model, pairs = gradients[chunk.encoder.index], chunk.encoder.model, []
        for number, (x, grad, rows) in enumerate(zip(chunk.found, of_chunk, chunk.rows, strict=True)):
            if x.dim() and grad is not None:
                pairs.append((x, grad[rows]))
            elif not x.dim() and last_of_model[id(model)] is chunk:  # what belongs to the whole batch, once
                same = {c.encoder.index for c in chunks if c.encoder.model is model}
                pairs += [(x, of) for k in same if (of := gradients[k][number]) is not None]
        for key, engine in engines.items():
            if last_of_engine[key] is chunk:
                owned = {id(p) for p in engine.module.parameters()}
                pairs += [(p, grad) for p, grad in extra if id(p) in owned]
        return pairs

    def backward(of: Sequence[Chunk]) -> None:
        pairs = [pair for chunk in of for pair in roots(chunk)]
        with _held(engines.values(), but=finished(of)):
            backward_from(pairs)
        for chunk in of:
            chunk.forget()

    def finished(of: Sequence[Chunk]) -> set[int]:
        return {key for key, chunk in last_of_engine.items() if any(chunk is c for c in of)}

    def forward(of: Sequence[Chunk]) -> None:
        for chunk in of:
            if chunk.kept:
                continue
            first = chunk.found
            chunk.encoder.buffers.set(chunk.before)
            with chunk.replay.again(), _held(engines.values(), but=finished(of)):
                chunk.found = _with_graph(chunk)
            check_same(first, chunk.found, chunk.encoder.name)

    # Kept graphs come first: an engine that was prepared in a forward pass takes the next backward pass for its last.
    # One that was prepared in the first pass already, since all of its graphs are kept, gets them in one backward pass.
    at_once = any(engine.control.decides == "forward" and last_of_engine[key].kept for key, engine in engines.items())
    groups = [*([kept] if at_once else [[chunk] for chunk in kept]), *([chunk] for chunk in replayed)]
    first_to_sync = next((k for k, group in enumerate(groups) if finished(group)), len(groups) - 1)

    def before_sync() -> None:
        for group in groups[:first_to_sync]:
            forward(group)
            backward(group)
        forward(groups[first_to_sync])

    agree(before_sync)
    backward(groups[first_to_sync])
    for group in groups[first_to_sync + 1 :]:
        forward(group)
        backward(group)


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of the graph of these tensors that require a gradient."""
    found, seen = [], set()
    stack = [x.grad_fn for x in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        stack.extend(following for following, _ in node.next_functions)
    return found


def backward_from(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """One backward pass from all of these tensors, each with its gradient."""
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


def _with_graph(chunk: Chunk) -> tuple[Tensor, ...]:
    with torch.enable_grad(), fresh_autocast_cache():
        found = chunk.encode()
    for number, x in enumerate(found):
        if x.is_floating_point() and not x.requires_grad:
            raise ValueError(
                f"representation {number} of {chunk.encoder.name} has no gradient: is the model frozen, or its output "
                "detached? What is not trained goes to the loss as a keyword argument"
            )
    return found


def check_same(first: Sequence[Tensor], second: Sequence[Tensor], name: str) -> None:
    for number, (x, y) in enumerate(zip(first, second, strict=True)):
        y = y.detach()
        if x.shape == y.shape and (torch.equal(x, y) or not x.is_floating_point()):
            continue
        size = torch.linalg.vector_norm(x.double()) if x.shape == y.shape else torch.zeros(())
        away = torch.linalg.vector_norm((x - y).double()) if x.shape == y.shape else torch.ones(())
        if not away <= torch.finfo(x.dtype).eps ** 0.5 * size and x.isfinite().all():
            raise RuntimeError(
                f"the second forward pass of {name} gave another representation {number} than the first (they differ "
                f"by {away.item():.1e} of {size.item():.1e}): the gradient would be wrong. Random numbers of PyTorch, "
                "Python and NumPy and registered buffers are set back; does it change a tensor or a number of its own?"
            )


def _uses(chunk: Chunk, engine: Synchronised) -> bool:
    return any(own.module is engine.module for own in chunk.encoder.engines)


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
