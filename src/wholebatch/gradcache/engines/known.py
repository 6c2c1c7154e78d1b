"""The engines that are known, and the modules that they synchronize.

Wrappers (of accelerate, Fabric, torch.compile) hold an engine's module among their children and pass on its attributes.
So a module counts as an engine only by the attributes of its class. `register_sync_control` adds an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from ..._base.checks import check_instance
from .ddp import DDP
from .deepspeed import DEEPSPEED, DEEPSPEED_3
from .fsdp import FSDP1, FSDP2
from .sync_control import SyncControl, no_sync

_OTHERS = SyncControl(lambda module: callable(getattr(type(module), "no_sync", None)), no_sync)
_BUILT_IN = (DDP, FSDP2, FSDP1, DEEPSPEED_3, DEEPSPEED, _OTHERS)
_REGISTERED: list[SyncControl] = []  # the latest first


def register_sync_control(control: SyncControl) -> None:
    """Register another engine for gradient caching; its `matches` is called before those of other engines.

    The first step checks that gradients stay in `.grad` while `hold` is entered, unless the control has `remember`: a
    `hold` that does nothing is an error.

    Raises:
        ValueError: if control is no :class:`SyncControl`.
    """
    check_instance("control", control, SyncControl, "a SyncControl")
    _REGISTERED.insert(0, control)


def is_registered(control: SyncControl) -> bool:
    """Return whether a caller has registered it."""
    return any(control is registered for registered in _REGISTERED)


def control_of(module: nn.Module, no_engines: set[type] | None = None) -> SyncControl | None:
    """Return the switch of the engine whose module this is.

    Classes in `no_engines` have not matched a built-in control in the same step, and the class of this module is added
    if it does not: a step asks for thousands of modules of few classes.
    """
    no_engines, kind = set() if no_engines is None else no_engines, type(module)
    for control in _REGISTERED if kind in no_engines else (*_REGISTERED, *_BUILT_IN):
        if control.matches(module):
            return control
    no_engines.add(kind)
    return None


class Synchronized:
    """A module whose engine synchronizes its gradients, as its caller has switched it when this object was made."""

    def __init__(self, module: nn.Module, control: SyncControl) -> None:
        self.module, self.control = module, control
        self.off = control.is_off is not None and control.is_off(module)  # by the caller's switch
        self.hides = control.hides is not None and control.hides(module)

    def hold(self) -> AbstractContextManager[None]:
        """Return a context in which it does not synchronize."""
        return nullcontext() if self.control.hold is None else self.control.hold(self.module)

    def release(self) -> AbstractContextManager[None]:
        """Return a context in which it synchronizes, unless its caller has switched that off."""
        if self.off:
            return self.hold()
        return nullcontext() if self.control.resume is None else self.control.resume(self.module)

    def state(self) -> object:
        """Return a value that is another one after the engine has changed the module's parameters, or None."""
        return None if self.control.state is None else self.control.state(self.module)

    def coalesce(self) -> AbstractContextManager[None]:
        """Return a context for all of a step's passes."""
        return nullcontext() if self.control.coalesce is None else self.control.coalesce(self.module)


def synchronized(modules: Iterable[nn.Module]) -> list[Synchronized]:
    """Return the outermost modules among these and their children that an engine synchronizes, each once."""
    visited: dict[int, Synchronized | None] = {}
    no_engines: set[type] = set()
    todo = [*modules][::-1]
    while todo:
        module = todo.pop()
        if id(module) not in visited:
            control = control_of(module, no_engines)
            visited[id(module)] = None if control is None else Synchronized(module, control)
            if control is None:
                todo += [inner for inner in reversed(module._modules.values()) if inner is not None]
    return [engine for engine in visited.values() if engine is not None]
