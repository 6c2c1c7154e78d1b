"""One backward pass of a chunk, seen by its engines or hidden from them.

An engine has its hooks where autograd accumulates a gradient into `.grad`. In its last pass DDP waits until the hooks
of all its parameters have run. Other chunks may have reached some of them, and the last one not: two models may be two
functions of one engine, each of one of its towers. These get zeros. Their gradients exist by then, and are synchronized
with all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .._base.graph import leaves_of
from .._base.modules import parameters_in
from .engines.known import Synchronized

Pairs = list[tuple[Tensor, Tensor]]  # tensors with their gradients


def backward(
    pairs: Pairs, last_of: Sequence[Synchronized], reached: Mapping[int, Mapping[int, Tensor]] | None = None
) -> None:
    """Run one backward pass from all of these tensors, each with its gradient.

    Args:
        pairs: the tensors and gradients.
        last_of: engines whose last pass this is: parameters that they wait for, and which it does not reach, get zeros.
            So do the rest if it raises: the engines of other ranks wait for them.
        reached: of an engine whose module has the key's id, the parameters that it waits for, if its control does not
            know them.
    """
    known, unsure = dict[int, Tensor](), dict[int, Tensor]()
    for engine in last_of:
        key, control = id(engine.module), engine.control
        awaited = {id(p): p for p in control.awaits(engine.module)} if control.awaits is not None else {}
        # An engine that hides its other passes counts the gradients of each parameter: zeros come in the same pass.
        (known if engine.hides else unsure).update({**awaited, **(reached or {}).get(key, {})})
    roots = [*pairs, *_zeros(_missing_from_graph(pairs, known))]
    missing = _missing_from_graph(roots, unsure)
    waits = [e.module for e in last_of if not e.control.collective]
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


def hidden_backward(pairs: Pairs) -> None:
    """Run one backward pass from all of these tensors, each with its gradient, in which no hook of an engine runs.

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
