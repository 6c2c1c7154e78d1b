"""Check that gradients stay in `.grad` after a chunk's backward pass, while more chunks are to come.

An engine that reduces gradients nevertheless averages `.grad`, or removes it (as DeepSpeed's ZeRO does). Then only the
last chunk counts on all ranks, although the loss is right and no rank differs from another. Either the `hold` of a
registered SyncControl does not hold, or the model has an engine that is not known. So this module watches the first
such pass, at the smallest parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from .known import Synchronized, is_registered

HOW_TO_REGISTER = """Register its switch:

    wb.gradcache.register_sync_control(
        wb.gradcache.SyncControl(
            matches=lambda module: isinstance(module, TheEngine),
            hold=lambda module: module.no_sync(),  # a context in which gradients stay in .grad
        )
    )"""
_FEW = 3  # parameters of an engine that are watched


@contextmanager
def watched(engines: Iterable[Synchronized], of_none: Iterable[Tensor] = ()) -> Iterator[list[ValueError]]:
    """Watch a backward pass in which these engines are held; afterward the list has the errors.

    Args:
        engines: those whose control a caller has registered are watched.
        of_none: parameters that belong to no known engine.
    """
    arrived: dict[int, Tensor] = {}
    watching, hooks, mistakes = [], [], list[ValueError]()
    registered = [e for e in engines if is_registered(e.control) and e.control.remember is None]
    for engine, parameters in [(None, of_none), *((e, e.module.parameters()) for e in registered)]:
        trained = [p for p in parameters if p.requires_grad and p.layout is torch.strided]
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
            change = _change(p, grad if before is None else before + grad)
            if change:
                mistakes.append(_unknown(change, p) if engine is None else _mistake(engine, change, p))


def _keep(arrived: dict[int, Tensor], key: int, grad: Tensor | None) -> None:
    if grad is not None:  # a node may return none
        arrived[key] = _dense(grad).clone()


def _dense(grad: Tensor) -> Tensor:
    """Return the gradient, which an embedding may have made sparse, as a dense tensor."""
    grad = grad.detach()
    return grad if grad.layout is torch.strided else grad.to_dense()


def _change(p: Tensor, expected: Tensor) -> str:
    """Return what has happened to a parameter's gradient, if it is not the expected one."""
    if p.grad is None:
        return "took the gradient out of .grad"
    if p.grad.shape != expected.shape or not torch.allclose(_dense(p.grad), expected, rtol=1e-2, equal_nan=True):
        return "changed the gradient"
    return ""


def _mistake(engine: Synchronized, change: str, p: Tensor) -> ValueError:
    return ValueError(
        f"the engine of {type(engine.module).__name__} must leave gradients in .grad while the `hold` of its "
        f"registered SyncControl is entered, and {change} of a parameter of shape {tuple(p.shape)}: it reduces in "
        "every chunk's backward pass. Give a `hold` that keeps it from that; where the engine keeps gradients to "
        "itself until it synchronizes, give `remember` too"
    )


def _unknown(change: str, p: Tensor) -> ValueError:
    return ValueError(
        f"gradients must stay in .grad until all chunks have added theirs, and something {change} of a parameter of "
        f"shape {tuple(p.shape)} in a chunk's pass: an engine that gradient caching does not know? {HOW_TO_REGISTER}"
    )
