"""Which modules a model refers to, found without a call, and which it calls.

From the modules that a model refers to ranks know, before any call, whether passes are collective. In a call, a hook on
all modules records them, whether the model has them from a closure, a global or an object's attribute. The outermost
ones are the models of the call: a step tracks their buffers and the gradients of their parameters. Engines are held
before their forward pass decides whether they synchronize.

Calls inside one of torch's own layers are not observed again after a first call of it: they are those of its modules.
Modules inside a compiled graph are not observed; the compiled module itself is, with all modules inside it.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from .._base.modules import modules_in, parameters_in
from .engines.known import Synchronized, control_of, synchronized
from .replay import Buffers

_DEPTH, _MANY = 6, 1000  # how deep, and among how many objects, a function's modules are searched


def modules_of(*objects: object) -> list[nn.Module]:
    """Return the modules among these, and in functions' closures and globals, objects and containers among these."""
    modules: dict[int, nn.Module] = {}
    ids: set[int] = set()
    level: list[object] = [*objects]
    for _ in range(_DEPTH):
        level = [x for x in level if id(x) not in ids and not isinstance(x, str | bytes | int | float | type)][:_MANY]
        ids.update(map(id, level))
        modules |= {id(x): x for x in level if isinstance(x, nn.Module)}
        level = [inner for x in level if not isinstance(x, nn.Module) for inner in _referents(x)]
    return [*modules.values()]


def _referents(x: Any) -> Iterable[object]:
    """Return the objects that an object refers to."""
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, types.FunctionType):
        unwrapped = inspect.unwrap(x)
        cells = [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
        return [*cells, *_globals_of(x.__code__, x.__globals__), *([] if unwrapped is x else [unwrapped])]
    if isinstance(x, Mapping):
        return list(x.values()) if len(x) <= _MANY else []
    if isinstance(x, list | tuple | set | frozenset):
        return list(x) if len(x) <= _MANY else []
    return list(vars(x).values()) if hasattr(x, "__dict__") and not isinstance(x, types.ModuleType) else []


def _globals_of(code: types.CodeType, names: Mapping[str, object]) -> list[object]:
    """Return the globals that a function and its inner functions name; of Python modules, the named attributes."""
    objects = []
    for name in code.co_names:
        x = names.get(name)
        if isinstance(x, types.ModuleType):
            objects += [vars(x).get(inner) for inner in code.co_names]
        else:
            objects.append(x)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            objects += _globals_of(constant, names)
    return objects


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@dataclass(eq=False)
class Calls:
    """The modules and engines that all calls of one model have called, by id."""

    modules: dict[int, nn.Module] = field(default_factory=dict)  # the outermost, whose parameters are the model's
    seen: dict[int, nn.Module] = field(default_factory=dict)  # these, and inner ones, as far as the hook has seen them
    versions: dict[int, int] = field(default_factory=dict)  # of their parameters, before the first call
    engines: dict[int, Synchronized] = field(default_factory=dict)  # by the id of the module


class Observer:
    """The modules that the calls of a step have called, and whose buffers are tracked from their first call on."""

    def __init__(self, buffers: Buffers, *, may_be_collective: bool = True) -> None:
        self.buffers, self.may_be_collective = buffers, may_be_collective
        self.no_engines: set[type] = set()  # classes of modules that have been asked for
        self.plain: dict[int, nn.Module] = {}  # modules of this step that are no engines and not compiled
        self._closed: dict[int, bool] = {}  # of modules that were called twice
        self._broadcast: set[int] = set()  # engines that have been called: DDP broadcasts buffers in the first

    def is_closed(self, module: nn.Module) -> bool:
        """Return whether a plain module calls only modules inside of it, all plain."""
        if id(module) not in self._closed:
            self._closed[id(module)] = all(
                _is_torch_layer(inner) and (id(inner) in self.plain or control_of(inner, self.no_engines) is None)
                for inner in modules_in(module)
            )
        return self._closed[id(module)]

    @contextmanager
    def call(self, calls: Calls, *objects: object, visible: Iterable[nn.Module]) -> Iterator[list[Synchronized]]:
        """Add a call of a model, which is made inside, to its calls; hold the engines that it calls, and list these.

        The objects are the model and modules among its arguments. Of the modules that these refer to, `visible`, the
        compiled ones count as called.
        """
        with ExitStack() as stack:
            called = _Call(self, calls, stack)
            for x in objects:
                local = getattr(x, "__self__", x)
                if isinstance(local, nn.Module):
                    called.add(local)
                    if local is not x:  # a method, whose call is not a call of its module
                        called.add_engines(engine for engine in synchronized([local]) if engine.module is local)
            for module in visible:
                if _is_compiled(module):  # nor would the calls inside be seen
                    called.add(module)
                    called.add_engines(synchronized([module]))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
            called.watch()
            stack.callback(called.unwatch)
            yield called.engines


class _Call:
    """One call of a model."""

    def __init__(self, observer: Observer, calls: Calls, stack: ExitStack) -> None:
        self.engines: list[Synchronized] = []  # of this call
        self._observer, self._calls, self._stack, self._thread = observer, calls, stack, threading.get_ident()
        self._counted: set[int] = set()  # all that is inside the modules of this call
        self._inside: set[int] = set()  # or inside its engines
        self._after_broadcast: set[int] = set()

    def watch(self) -> None:
        """Let the hook see all calls of modules."""
        self._hook = register_module_forward_pre_hook(self.record)

    def unwatch(self) -> None:
        """Let the hook see no more calls."""
        self._hook.remove()

    def _leave_out_calls_inside(self, module: nn.Module) -> None:
        """Let the hook see no calls in a module that is about to be called."""

        def watch_again(*_: object) -> None:
            handle.remove()
            self.watch()

        self.unwatch()
        handle = module.register_forward_hook(watch_again, always_call=True)
        self._stack.callback(handle.remove)  # an interrupt does not call it

    def add(self, module: nn.Module) -> None:
        """Count a module as called."""
        if id(module) not in self._counted:
            self._calls.modules[id(module)] = module
            self._calls.versions = versions_of(parameters_in(module)) | self._calls.versions
            self._counted.update(map(id, modules_in(module)))
            self._observer.buffers.add(module)

    def add_engines(self, engines: Iterable[Synchronized]) -> None:
        """Count modules that an engine synchronizes as called, and hold their engines."""
        for engine in engines:
            module = engine.module
            if id(module) in self._inside:
                continue
            if engine.control.collective and not self._observer.may_be_collective:
                raise ValueError(
                    f"{type(module).__name__} has an engine whose passes are collective, which could not be seen "
                    "before the call, and ranks have different numbers of chunks or keep different graphs: give the "
                    "module itself as the model, or a function that refers to it directly"
                )
            if engine.control.check is not None:
                engine.control.check(module)
            self.engines.append(engine)
            self._calls.engines[id(module)] = engine
            self._inside.update(map(id, modules_in(module)))
            self._stack.enter_context(engine.hold())
            if isinstance(module, DistributedDataParallel) and id(module) not in self._observer._broadcast:
                self._observer._broadcast.add(id(module))
                self._after_broadcast.add(id(module.module))

    def record(self, module: nn.Module, _args: Any) -> None:
        """Count a module as called; this is the hook, which also runs for what other threads call."""
        if torch.compiler.is_dynamo_compiling() or threading.get_ident() != self._thread:
            return
        self._calls.seen[id(module)] = module
        if id(module) not in self._counted:
            self.add(module)
        if id(module) not in self._observer.plain:
            self._look_at(module)
        elif module._modules and self._observer.is_closed(module):
            self._leave_out_calls_inside(module)
        if id(module) in self._after_broadcast:
            self._after_broadcast.remove(id(module))
            self._observer.buffers.begin(module)

    def _look_at(self, module: nn.Module) -> None:
        """Hold the engines of a module that the hook has recorded."""
        control = control_of(module, self._observer.no_engines)
        if control is not None:
            self.add_engines([Synchronized(module, control)])
        elif _is_compiled(module):
            self.add_engines(synchronized([module]))
        else:
            self._observer.plain[id(module)] = module


def _is_compiled(module: nn.Module) -> bool:
    """Return whether compiled code makes the calls inside the module."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def _is_torch_layer(module: nn.Module) -> bool:
    """Return whether the code of torch alone decides which modules this one calls."""
    kind, values = type(module), vars(module)
    if not (kind.__module__.startswith("torch.nn.") and kind.forward.__module__.startswith("torch.nn.")):
        return False
    if module._forward_hooks or module._forward_pre_hooks or "forward" in values or _is_compiled(module):
        return False
    functions = [x for x in values.values() if callable(x)]  # such as an activation
    return all((getattr(x, "__module__", None) or "").startswith("torch.") for x in functions)


def versions_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return how often each tensor has been changed in place, by its id."""
    return {id(p): 0 if p.is_inference() else p._version for p in tensors}
