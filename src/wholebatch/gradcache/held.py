"""Check that the `hold` of a registered SyncControl keeps the engine from reducing gradients.

In a held pass, gradients must accumulate in the parameters' `.grad`. An engine that reduces them nevertheless averages
`.grad`, or removes it (as DeepSpeed's ZeRO does). Then only the last chunk counts on all ranks, although the loss is
right and no rank differs from another. So this module watches the first held pass, at the engine's smallest parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from .engines import Synchronized, is_registered

_FEW = 3  # parameters of an engine that are watched


@contextmanager
def watched(engines: Iterable[Synchronized]) -> Iterator[list[ValueError]]:
    """Watch a backward pass in which these engines are held; afterward the list has the errors."""
    arrived: dict[int, Tensor] = {}
    watching, hooks, mistakes = [], [], list[ValueError]()
    for engine in engines:
        if not is_registered(engine.control) or engine.control.remember is not None:
            continue
        trained = [p for p in engine.module.parameters() if p.requires_grad and p.layout is torch.strided]
        for p in sorted(trained, key=torch.numel)[:_FEW]:
            watching.append((engine, p, None if p.grad is None else _dense(p.grad).clone()))
            hooks.append(p.register_hook(partial(_keep, arrived, id(p))))
    try:
        yield mistakes
    finally:
        for hook in hooks:
            hook.remove()
    for engine, p, before in watching:
        if id(p) in arrived:
            grad = arrived[id(p)]
            mistakes += _mistake(engine, p, grad if before is None else before + grad)


def _keep(arrived: dict[int, Tensor], key: int, grad: Tensor) -> None:
    arrived[key] = _dense(grad).clone()


def _dense(grad: Tensor) -> Tensor:
    """Return the gradient, which an embedding may have made sparse, as a dense tensor."""
    grad = grad.detach()
    return grad if grad.layout is torch.strided else grad.to_dense()


def _mistake(engine: Synchronized, p: Tensor, expected: Tensor) -> list[ValueError]:
    if p.grad is None:
        what = "took the gradient out of .grad"
    elif p.grad.shape != expected.shape or not torch.allclose(_dense(p.grad), expected, rtol=1e-2, equal_nan=True):
        what = "changed the gradient"
    else:
        return []
    return [
        ValueError(
            f"the engine of {type(engine.module).__name__} must leave gradients in .grad while the `hold` of its "
            f"registered SyncControl is entered, and {what} of a parameter of shape {tuple(p.shape)}: it reduces in "
            "every chunk's backward pass. Give a `hold` that keeps it from that; where the engine keeps gradients to "
            "itself until it synchronizes, give `remember` too"
        )
    ]
