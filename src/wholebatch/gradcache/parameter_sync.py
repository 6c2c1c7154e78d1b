"""How an engine is kept from synchronising gradients before a step's last backward pass.

A step makes a backward pass for every chunk, and an engine would synchronise in each. It is told not to, but for the
last chunk of its module. When it listens differs:

    engine                       is told by                            and decides             its passes are
    ---------------------------  ------------------------------------  ----------------------  --------------
    DistributedDataParallel      no_sync()                             in the forward pass     this rank's own
    FSDP2 (fully_shard)          set_requires_gradient_sync(False)     in the backward pass    collective
    FSDP1, DeepSpeed, and so on  no_sync()                             in the backward pass    collective

Passes are collective where parameters are gathered for them: all ranks then make the same ones.

Wrappers (of accelerate, Fabric, torch.compile) hold such a module among their children, where it is found: only what a
module's class says of itself counts, not what a wrapper passes on.
`register_sync_control` adds an engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class SyncControl:
    """An engine's switch.

    Args:
        matches: whether a module is one of this engine's.
        hold: a context in which the module's passes leave gradients on their rank.
        decides: the pass in which the engine looks at its switch.
        collective: whether all ranks have to make the same passes.
    """

    matches: Callable[[nn.Module], bool]
    hold: Callable[[Any], AbstractContextManager[None]]
    decides: Literal["forward", "backward"] = "backward"
    collective: bool = True


@contextmanager
def _hold_fully_sharded(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _no_sync(module: Any) -> AbstractContextManager[None]:
    held: AbstractContextManager[None] = module.no_sync()
    return held


_CONTROLS = [
    SyncControl(lambda module: isinstance(module, DistributedDataParallel), _no_sync, "forward", collective=False),
    SyncControl(lambda module: hasattr(type(module), "set_requires_gradient_sync"), _hold_fully_sharded),
    SyncControl(lambda module: callable(getattr(type(module), "no_sync", None)), _no_sync),
]


def register_sync_control(control: SyncControl) -> None:
    """Let gradient caching know another engine; it is asked before those that are there."""
    _CONTROLS.insert(0, control)


@dataclass(frozen=True)
class Synchronised:
    """A module whose engine synchronises its gradients."""

    module: nn.Module
    control: SyncControl

    def hold(self) -> AbstractContextManager[None]:
        """A context in which it does not."""
        return self.control.hold(self.module)


def synchronised(modules: Iterable[nn.Module]) -> list[Synchronised]:
    """The outermost modules among these and their children that an engine synchronises, each once."""
    found = {id(one.module): one for module in modules for one in _outermost(module)}
    return [*found.values()]


def _outermost(module: nn.Module) -> list[Synchronised]:
    for control in _CONTROLS:
        if control.matches(module):
            return [Synchronised(module, control)]
    return [found for child in module.children() for found in _outermost(child)]


@contextmanager
def watched(engines: Sequence[Synchronised]) -> Iterator[list[Synchronised]]:
    """A list of those whose modules are called inside."""
    called: list[Synchronised] = []
    handles = [
        engine.module.register_forward_pre_hook(lambda _module, _args, engine=engine: called.append(engine))
        for engine in engines
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def modules_of(*objects: object) -> list[nn.Module]:
    """The modules among these, and those that functions among them are methods of, or see in the scopes around them."""
    found: list[nn.Module] = []
    for x in objects:
        if isinstance(x, nn.Module):
            found.append(x)
            continue
        cells = getattr(inspect.unwrap(x), "__closure__", None) if callable(x) else None
        seen = [cell.cell_contents for cell in cells or ()] + [getattr(x, "__self__", None)]
        if isinstance(x, partial):
            seen += [x.func, *x.args, *x.keywords.values()]
        for inner in seen:
            found += [inner] if isinstance(inner, nn.Module) else modules_of(inner) if inspect.isfunction(inner) else []
            if isinstance(inner, list | tuple):
                found += [module for module in inner if isinstance(module, nn.Module)]
    return found
