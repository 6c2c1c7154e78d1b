"""One forward pass of a chunk with its graph, its comparison with the first, and one backward pass.

An engine has its hooks where autograd accumulates a gradient into `.grad`. In its last pass DDP waits until the hooks
of all its parameters have run. Other chunks may have reached some of them, and the last one not: two models may be two
functions of one engine, each of one of its towers. These get zeros. Their gradients exist by then, and are synchronized
with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from .._base.graph import leaves_of
from .._base.modules import parameters_in
from .chunks import Chunk, differentiable
from .engines.known import Synchronized
from .replay import fresh_autocast_cache


class NoGraphError(ValueError):
    """A representation that should have a gradient has none."""


def with_graph(
    encode: Callable[[], tuple[Tensor, ...]], name: str, *, may_be_frozen: bool = False
) -> tuple[Tensor, ...]:
    """Return encode(), with its graph; raise NoGraphError if no tensor has a gradient, and it may not be frozen."""
    with torch.enable_grad(), fresh_autocast_cache():
        reps = encode()
    if not may_be_frozen and not any(x.requires_grad for x in reps):
        raise NoGraphError(
            f"the output of {name} has no gradient: is it frozen, its output detached, or this inference mode? "
            "Leave a frozen model out, encode its input by wb.gradcache.encode(model, input, chunk_size), and give the "
            "step the result as a keyword argument, for the loss"
        )
    return reps


def encoded_with_graph(chunk: Chunk) -> tuple[Tensor, ...]:
    """Return the chunk's representations, with their graph.

    The first such pass of a model decides which of its representations have a gradient; later, none is a NoGraphError.
    """
    encoder = chunk.encoder
    reps = with_graph(chunk.encode, encoder.name, may_be_frozen=encoder.may_be_frozen)
    encoder.trained = encoder.trained or [x.requires_grad for x in reps]
    for number, (x, trained) in enumerate(zip(reps, encoder.trained, strict=False)):
        if trained and not x.requires_grad:
            raise NoGraphError(f"representation {number} of {encoder.name} has a gradient in some chunks, not in all")
    return reps


def difference(first: Sequence[Tensor], second: Sequence[Tensor], name: str) -> RuntimeError | None:
    """Return the error if the second pass's representations are not the first's, up to a kernel's order of summation.

    They may differ by sqrt(eps) of their norm, in half precision by 4 eps.
    """
    reason = None
    if [x.shape for x in first] != [x.shape for x in second]:
        reason = f"shapes {[tuple(x.shape) for x in second]}, and the first {[tuple(x.shape) for x in first]}"
    else:
        for number, (x, y) in enumerate(zip(first, second, strict=True)):
            y = y.detach()
            if torch.equal(x, y) or not differentiable(x) or not x.isfinite().all():
                continue
            away, size = torch.linalg.vector_norm(x - y).item(), torch.linalg.vector_norm(x).item()
            eps = torch.finfo(x.dtype).eps
            if not away <= min(eps**0.5, 4 * eps if x.dtype.itemsize == 2 else 1.0) * size:
                reason = f"another representation {number} than the first (they differ by {away:.1e} of {size:.1e})"
                break
    if reason is None:
        return None
    return RuntimeError(
        f"the second forward pass of {name} gave {reason}: the gradient would be wrong. "
        "Random numbers of PyTorch, Python and NumPy and registered buffers are set back; does the model change a "
        "tensor or number that is none of these?"
    )


Pairs = list[tuple[Tensor, Tensor]]  # tensors with their gradients


@contextmanager
def switched(held: Iterable[Synchronized], last: Iterable[Synchronized]) -> Iterator[None]:
    """Keep engines from synchronizing gradients inside, except those whose last pass it is."""
    with ExitStack() as stack:
        for engine in held:
            stack.enter_context(engine.hold())
        for engine in last:
            stack.enter_context(engine.release())
        yield


def backward(
    pairs: Pairs,
    held: Iterable[Synchronized],  # engines that have another pass after this one
    last: Sequence[Synchronized],  # engines whose last pass this is
    reached: Mapping[int, Mapping[int, Tensor]] | None = None,  # by the id of a module whose engine waits for these
) -> None:
    """Run one backward pass from all of these tensors, each with its gradient.

    Parameters for which an engine waits in its last pass, and which the pass does not reach, get zeros. So do the rest
    if it raises: the engines of other ranks wait for them. Controls know these parameters, or `reached` does.
    """
    if any(engine.hides for engine in held):
        _hidden_backward(pairs)
        return
    known, unsure = dict[int, Tensor](), dict[int, Tensor]()
    for engine in last:
        key, control = id(engine.module), engine.control
        awaited = {id(p): p for p in control.awaits(engine.module)} if control.awaits is not None else {}
        # An engine that hides its other passes counts the gradients of each parameter: zeros come in the same pass.
        (known if engine.hides else unsure).update({**awaited, **(reached or {}).get(key, {})})
    roots = [*pairs, *_zeros(_missing_from_graph(pairs, known))]
    missing = _missing_from_graph(roots, unsure)
    waits = [e.module for e in last if not e.control.collective]
    waiting = [p for p in parameters_in(*waits) if p.requires_grad]
    with _arrivals([*{*missing, *waiting}]) as arrived:
        try:
            _run(roots)
        except Exception:
            if waiting:
                _run(_zeros(p for p in {*leaves_of(x for x, _ in roots), *missing} if id(p) not in arrived))
            raise
    _run(_zeros(p for p in missing if id(p) not in arrived))


def _run(pairs: Pairs) -> None:
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


def _zeros(tensors: Iterable[Tensor]) -> Pairs:
    return [(p, torch.zeros_like(p)) for p in tensors]


def _missing_from_graph(pairs: Pairs, awaited: Mapping[int, Tensor]) -> list[Tensor]:
    """Return the awaited parameters that do not occur in the graph of these tensors.

    A backward pass may reach some of them: the graph does not show what is inside of a checkpoint that goes backward by
    itself (`use_reentrant=True`).
    """
    if not awaited:
        return []
    roots = [x for x, _ in pairs]
    in_graph = {id(p) for p in (*roots, *leaves_of(roots))}
    return [p for key, p in awaited.items() if key not in in_graph]


@contextmanager
def _arrivals(tensors: Sequence[Tensor]) -> Iterator[set[int]]:
    """Yield a set to which autograd adds the ids of those of these tensors that get a gradient inside."""
    arrived: set[int] = set()
    hooks = [p.register_post_accumulate_grad_hook(lambda p: arrived.add(id(p))) for p in tensors]
    try:
        yield arrived
    finally:
        for hook in hooks:
            hook.remove()


def _hidden_backward(pairs: Pairs) -> None:
    """Run the backward pass without a hook of an engine.

    Gradients are added to `.grad` here instead of by autograd. As there, each `.grad` is a tensor of its own.
    """
    leaves = leaves_of(x for x, _ in pairs)
    if not pairs or not leaves:
        return
    grad_outputs = [grad for _, grad in pairs]
    grads: Sequence[Tensor | None] = torch.autograd.grad([x for x, _ in pairs], leaves, grad_outputs, allow_unused=True)
    with torch.no_grad():
        for p, grad in zip(leaves, grads, strict=True):
            if grad is None:
                continue
            if p.grad is None:
                p.grad = grad.clone()
            elif p.grad.layout is torch.strided:
                p.grad.add_(grad)
            else:
                p.grad = p.grad + grad
