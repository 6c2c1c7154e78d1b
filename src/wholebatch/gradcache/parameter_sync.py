"""How an engine is kept from synchronising gradients before a step's last backward pass.

A step makes a backward pass for every chunk, and an engine would synchronise in each. It is told not to, but for the
last chunk of its module. When it listens differs:

    engine                       is told by                            and decides             its passes are
    ---------------------------  ------------------------------------  ----------------------  --------------
    DistributedDataParallel      no_sync()                             in the forward pass     this rank's own
    FSDP2 (fully_shard)          set_requires_gradient_sync(False)     in the backward pass    collective
    FSDP1, DeepSpeed, and so on  no_sync()                             in the backward pass    collective

Passes are collective where parameters are gathered for them: all ranks then make the same ones.

Wrappers (of accelerate, Fabric, torch.compile) hold such a module among their children, where it is found.
`register_sync_control` adds an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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
    SyncControl(lambda module: hasattr(module, "set_requires_gradient_sync"), _hold_fully_sharded),
    SyncControl(lambda module: callable(getattr(module, "no_sync", None)), _no_sync),
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


def synchronised(model: object) -> list[Synchronised]:
    """The outermost modules of the model that an engine synchronises; none, if it is no module."""
    if not isinstance(model, nn.Module):
        return []
    for control in _CONTROLS:
        if control.matches(model):
            return [Synchronised(model, control)]
    return [found for child in model.children() for found in synchronised(child)]
