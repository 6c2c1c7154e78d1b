"""Observe which modules a model calls, whether it has them from a closure, a global or an object's attribute.

A hook on all modules records them. The outermost ones are the models of the call: a step tracks their buffers and the
gradients of their parameters. Engines are held before their forward pass decides whether they synchronize.

Such a hook costs several calls of Python for each module. So it is off inside a closed module that the model calls
again: the earlier call has called no module outside it, and no module inside has an engine of its own.

Modules inside a compiled graph are not observed; the compiled module itself is, with all modules inside it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from .._base.modules import modules_in, parameters_in
from .engines.known import Synchronized, synchronized
from .replay import Buffers


class Calls:
    """The modules and engines that a model has called, in all of its calls."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}  # the outermost ones, whose parameters are the model's
        self.seen: dict[int, nn.Module] = {}  # these, and inner ones, as far as a hook has seen their calls
        self.engines: dict[int, Synchronized] = {}
        self.versions: dict[int, int] = {}  # of the parameters, before the first call
        self.inside: set[int] = set()  # all that is inside the modules
        self.closed: set[int] = set()  # modules inside which no call need be seen again


class Observer:
    """Observes the calls of a step.

    Args:
        buffers: keeps account of the called modules' buffers from their first call on.
        may_be_collective: whether a call may turn out to use an engine whose passes are collective.
    """

    def __init__(self, buffers: Buffers, *, may_be_collective: bool = True) -> None:
        self.buffers, self.may_be_collective = buffers, may_be_collective
        self.called_ddps: set[int] = set()  # DDP broadcasts buffers in its first call
        self.engines: dict[int, list[Synchronized]] = {}  # by the module whose call calls them
        self.searched: set[int] = set()  # modules that have been asked for their engines

    @contextmanager
    def call(self, calls: Calls, *objects: object, visible: Iterable[nn.Module]) -> Iterator[list[Synchronized]]:
        """Observe one call of a model, inside; yield a list of the engines that it calls, which are held.

        Args:
            calls: the model's, to which this one is added.
            objects: the model, and modules among its arguments.
            visible: the modules that these refer to (`modules_of`), of which the compiled ones count as called.
        """
        with ExitStack() as stack:
            call = _Call(self, calls, stack)
            for x in objects:
                local = getattr(x, "__self__", x)
                if isinstance(local, nn.Module):
                    call.add(local)
                    if local is not x:  # a method, whose call is not a call of its module
                        call.hold_engines_of(local)
            for module in visible:
                if _is_compiled(module):  # nor would the calls inside be seen
                    call.add(module)
                    call.hold_engines_of(module)
            call.listen()
            yield call.engines

    def search(self, module: nn.Module) -> None:
        """Find the outermost engines inside a module."""
        engines = synchronized([module])
        inside = {id(inner): inner for inner in modules_in(module)}
        for engine in engines:
            self.engines[id(engine.module)] = [engine]
            for inner in modules_in(engine.module)[1:]:
                inside.pop(id(inner), None)  # whose own engine counts if the outer one is not called
        for inner in inside.values() if engines else ():
            if _is_compiled(inner) and id(inner) not in self.engines:
                self.engines[id(inner)] = synchronized([inner])
        self.searched |= inside.keys()


class _Call:
    """One call of a model."""

    def __init__(self, observer: Observer, calls: Calls, stack: ExitStack) -> None:
        self.engines: list[Synchronized] = []
        self._observer, self._calls, self._stack = observer, calls, stack
        self._thread = threading.get_ident()
        self._held: set[int] = set()  # all that is inside the engines
        self._added: set[int] = set()
        self._after_broadcast: set[int] = set()
        self._inside: set[int] | None = None  # the module that the model itself has called

    def listen(self) -> None:
        """Record the modules that are called from here on."""
        self._hook = register_module_forward_pre_hook(self._record)
        self._stack.callback(self._hook.remove)

    def add(self, module: nn.Module) -> None:
        """Count a module as called."""
        calls = self._calls
        if id(module) not in calls.inside:
            calls.modules[id(module)] = module
            calls.versions = versions_of(parameters_in(module)) | calls.versions
            calls.inside.update(map(id, modules_in(module)))
        if id(module) in calls.modules and id(module) not in self._added:
            self._added.add(id(module))
            self._observer.buffers.add(module)

    def hold_engines_of(self, module: nn.Module) -> None:
        """Hold the engines that a call of the module calls."""
        if id(module) not in self._observer.searched:
            self._observer.search(module)
        for engine in self._observer.engines.get(id(module), ()):
            if id(engine.module) not in self._held:
                self._hold(Synchronized(engine.module, engine.control))

    def _hold(self, engine: Synchronized) -> None:
        module, observer = engine.module, self._observer
        if engine.control.collective and not observer.may_be_collective:
            raise ValueError(
                f"{type(module).__name__} has an engine whose passes are collective, which could not be seen before "
                "the call, and ranks have different numbers of chunks or keep different graphs: give the module itself "
                "as the model, or a function that refers to it directly"
            )
        if engine.control.check is not None:
            engine.control.check(module)
        self.engines.append(engine)
        self._calls.engines[id(module)] = engine
        self._held.update(map(id, modules_in(module)))
        self._stack.enter_context(engine.hold())
        if isinstance(module, DistributedDataParallel) and id(module) not in observer.called_ddps:
            observer.called_ddps.add(id(module))
            self._after_broadcast.add(id(module.module))

    def _record(self, module: nn.Module, _args: Any) -> None:
        """Count a module as called; this is the hook, which also runs for what other threads call."""
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        self._calls.seen[id(module)] = module
        if id(module) not in self._calls.inside or id(module) in self._calls.modules:
            self.add(module)
        if id(module) not in self._observer.searched or id(module) in self._observer.engines:
            self.hold_engines_of(module)
        if id(module) in self._after_broadcast:
            self._after_broadcast.remove(id(module))
            self._observer.buffers.begin(module)
        if self._inside is None:
            if module._modules:
                self._enter(module)
        elif id(module) not in self._inside:
            self._calls_others = True

    def _enter(self, module: nn.Module) -> None:
        """Note, until it returns, that the model itself has called this module; if it is closed, record none inside."""
        closed = self._calls.closed
        known = id(module) in closed
        self._inside, self._calls_others = set(() if known else map(id, modules_in(module))), False
        if known:
            self._hook.remove()

        def leave(*_: object) -> None:
            inside, self._inside = self._inside or set(), None
            returned.remove()
            if known:
                self.listen()
            elif not self._calls_others and not self._observer.engines.keys() & inside - {id(module)}:
                closed.add(id(module))

        returned = module.register_forward_hook(leave, always_call=True)
        self._stack.callback(returned.remove)


@contextmanager
def without_false_warnings() -> Iterator[None]:
    """Silence the warnings of first passes inside: that compiled modules have hooks, and checkpoints no gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        yield


def _is_compiled(module: nn.Module) -> bool:
    """Return whether compiled code makes the calls inside the module."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def versions_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return how often each tensor has been changed in place, by its id."""
    return {id(p): 0 if p.is_inference() else p._version for p in tensors}
