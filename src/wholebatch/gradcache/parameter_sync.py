"""Keep engines from synchronizing gradients before a step's last backward pass.

A step makes a backward pass for every chunk, and an engine would synchronize in each. So its switch is turned off,
except for the last chunk of its module. Engines read their switches at different times:

    engine                       switch                                read                    passes
    DDP                          no_sync()                             in the forward pass     each rank makes its own
    FSDP2 (fully_shard)          set_requires_gradient_sync(False)     in the backward pass    collective
    FSDP1 and so on              no_sync()                             in the backward pass    collective

Passes are collective if an engine gathers parameters for them: then all ranks must make the same passes. A switch that
the caller has turned off stays off; where the engine reads it in the forward pass, it counts as it was in the caller's.

An engine of another kind reduces all passes inside a context together, when the context ends (`coalesce`). Then nothing
is held, and all of a step's passes stand inside.

Wrappers (of accelerate, Fabric, torch.compile) hold such a module among their children and pass on its attributes. So a
module counts as an engine only by the attributes of its class. `register_sync_control` adds an engine.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._checks import check_callable, check_choice, check_flag, check_instance

_SWITCHES = ("reduce_grads", "all_reduce_grads")  # of FSDP2's groups of parameters
_ACCUMULATED = "unsharded_accumulated_grad"  # of FSDP2's parameters
_DEPTH, _MANY = 6, 1000  # how deep, and among how many objects, a function's modules are searched


@dataclass(frozen=True)
class SyncControl:
    """The switch of an engine, which keeps it from synchronizing gradients in each of a step's backward passes.

    Args:
        matches: returns whether a module is one of this engine's.
        hold: returns a context in which the module's passes leave gradients on their rank. All passes but the
            module's last are in it.
        coalesce: instead of `hold`: returns a context in which all of a step's passes are made, and at whose end the
            engine reduces their sum.
        decides: the pass in which the engine reads its switch.
        hides: returns whether the hooks of the module's parameters must not run in held passes, in which gradients are
            then added to `.grad` without autograd's accumulation. None: they may.
        recall: for a switch that the engine reads in the forward pass: saves its state, and returns a function that
            returns a context with that state. None: it is as it is.
        collective: whether all ranks have to make the same passes.
        remember: saves gradients that the engine keeps outside `.grad` until it synchronizes, and returns a function
            that restores them. None: all gradients are in the parameters' `.grad`.
        check: raises ValueError if the module's settings do not allow several backward passes.
        awaits: returns the parameters without whose gradients the engine does not finish its synchronization. Those
            that the last backward pass does not reach get zeros in it. None: it finishes anyway.
        sharded: whether each rank holds a part of the module's parameters, so that they are not compared.
    """

    matches: Callable[[nn.Module], bool]
    hold: Callable[[Any], AbstractContextManager[None]] | None = None  # takes a module of the registered class
    decides: Literal["forward", "backward"] = "backward"
    collective: bool = True
    remember: Callable[[Any], Callable[[], None]] | None = None  # likewise
    check: Callable[[Any], None] | None = None  # likewise
    awaits: Callable[[Any], Iterable[Tensor]] | None = None  # likewise
    sharded: bool = False
    coalesce: Callable[[Any], AbstractContextManager[None]] | None = None  # likewise
    recall: Callable[[Any], Callable[[], AbstractContextManager[None]]] | None = None  # likewise
    hides: Callable[[Any], bool] | None = None  # likewise

    def __post_init__(self) -> None:
        for name in ("matches", "hold", "coalesce", "remember", "check", "awaits", "recall", "hides"):
            if getattr(self, name) is not None or name == "matches":
                check_callable(name, getattr(self, name))
        if (self.hold is None) == (self.coalesce is None):
            given = "neither" if self.hold is None else "both"
            raise ValueError(
                f"hold or coalesce must be given, one of them, got {given}: hold keeps gradients on their rank in all "
                "passes but the last, coalesce stands around all passes and reduces at its end"
            )
        check_choice("decides", self.decides, ("forward", "backward"))
        check_flag("collective", self.collective)
        check_flag("sharded", self.sharded)


def _no_sync(module: Any) -> AbstractContextManager[None]:
    held: AbstractContextManager[None] = module.no_sync()
    return held


@contextmanager
def _hold_ddp(module: Any) -> Iterator[None]:
    """Keep a DistributedDataParallel from reducing, also one with a static graph.

    With static_graph=True, the first backward pass through the module starts a delayed reduction of all parameters,
    whatever no_sync() says. The module reads this attribute of its Python object where it would start it. It also
    counts the gradients of each parameter until its second synchronization, and later waits for as many: held passes
    are hidden from it.
    """
    static = module.static_graph
    with module.no_sync():
        module.static_graph = False
        try:
            yield
        finally:
            module.static_graph = static


def _recall_ddp(module: Any) -> Callable[[], AbstractContextManager[None]]:
    """Save whether the caller's forward pass is inside of no_sync()."""
    synchronizes = module.require_backward_grad_sync

    @contextmanager
    def as_it_was() -> Iterator[None]:
        now, module.require_backward_grad_sync = module.require_backward_grad_sync, synchronizes
        try:
            yield
        finally:
            module.require_backward_grad_sync = now

    return as_it_was


def parameters_of_ddp(module: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters whose gradients a DistributedDataParallel reduces, with their names in its module."""
    ignored = getattr(module, "parameters_to_ignore", ())
    return ((name, p) for name, p in module.module.named_parameters() if p.requires_grad and name not in ignored)


def _awaited_by_ddp(module: Any) -> Iterable[Tensor]:
    """Return all parameters of a DistributedDataParallel, unless it finds unused ones itself."""
    finds = module.find_unused_parameters and not module.static_graph
    return () if finds else (p for _, p in parameters_of_ddp(module))


def _fsdp1() -> type[Any] | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where this has not been imported, no module is of FSDP
    return getattr(fsdp, "FullyShardedDataParallel", None)


def _is_fsdp1(module: nn.Module) -> bool:
    kind = _fsdp1()
    return kind is not None and isinstance(module, kind)


def _check_fsdp1(module: Any) -> None:
    if getattr(module, "_is_root", None) is False:
        raise ValueError(
            "a model under FullyShardedDataParallel must be its outermost module, the only one with no_sync(), and was "
            "an inner one: give GradCache the outermost, or use fully_shard, whose modules work one by one"
        )


def fsdp_classes() -> list[type[Any]]:
    """Return the classes of FSDP's modules, of both versions, as far as they have been imported."""
    fsdp2 = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [kind for kind in (fsdp2, _fsdp1()) if kind is not None]


def whole_parameters_of_fsdp(module: Any) -> list[Tensor]:
    """Return the tensors that a module's graph has in the place of its shards."""
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)  # FSDP1
    shards = [shard for group in _groups_of(module) for shard in getattr(group, "fsdp_params", ())]
    whole = [getattr(shard, "_unsharded_param", None) for shard in shards]
    return [p for p in (flat, *whole) if p is not None]


def _groups_of(module: Any) -> list[Any]:
    """Return FSDP2's groups of parameters of one module."""
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    several = getattr(state, "_fsdp_param_groups", None)  # in newer releases of torch
    return [getattr(state, "_fsdp_param_group", None)] if several is None else several


def _shards_of(module: nn.Module) -> list[Any]:
    """Return FSDP2's groups of parameters in a module, whose switches and gradients have no public names.

    The list is empty where a release of torch has other names than those that are known here.
    """
    groups: list[Any] = []
    for inner in module.modules():
        if hasattr(type(inner), "set_requires_gradient_sync"):
            groups += _groups_of(inner)
    return [group for group in groups if all(hasattr(group, name) for name in (*_SWITCHES, "fsdp_params"))]


@contextmanager
def _hold_fully_sharded(module: Any) -> Iterator[None]:
    before = [(group, name, getattr(group, name)) for group in _shards_of(module) for name in _SWITCHES]
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        if not before:  # the public function does no more; it forgets what the caller has turned off
            module.set_requires_gradient_sync(True)
        for group, name, switch in before:
            setattr(group, name, switch)


def _remember_fully_sharded(module: Any) -> Callable[[], None]:
    """Save the gradients of whole parameters, which accumulate before they are reduced to shards.

    They are in the whole parameter's `grad`, and up to torch 2.14 also in another attribute. From 2.15 on that is a
    property which reads `grad`.
    """
    before = []
    for shard in (shard for group in _shards_of(module) for shard in group.fsdp_params):
        whole = getattr(shard, "_unsharded_param", None)
        held = vars(shard).get(_ACCUMULATED), None if whole is None else whole.grad
        before.append((shard, *(None if x is None else x.clone() for x in held)))

    def put_back() -> None:
        for shard, accumulated, grad in before:
            if _ACCUMULATED in vars(shard):
                setattr(shard, _ACCUMULATED, accumulated)
            if hasattr(shard, "_unsharded_param"):
                shard._unsharded_param.grad = grad

    return put_back


_CONTROLS = [
    SyncControl(
        lambda module: isinstance(module, DistributedDataParallel),
        _hold_ddp,
        decides="forward",
        collective=False,
        awaits=_awaited_by_ddp,
        recall=_recall_ddp,
        hides=lambda module: module.static_graph,
    ),
    SyncControl(
        lambda module: hasattr(type(module), "set_requires_gradient_sync"),
        _hold_fully_sharded,
        remember=_remember_fully_sharded,
        sharded=True,
    ),
    SyncControl(_is_fsdp1, _no_sync, sharded=True, check=_check_fsdp1),
    SyncControl(lambda module: callable(getattr(type(module), "no_sync", None)), _no_sync),
]


_BUILT_IN = tuple(_CONTROLS)


def register_sync_control(control: SyncControl) -> None:
    """Register another engine for gradient caching; its `matches` is called before those of other engines.

    The first step checks that gradients stay in `.grad` while `hold` is entered, unless the control has `remember`: a
    `hold` that does nothing is an error.

    Raises:
        ValueError: if control is no :class:`SyncControl`.
    """
    check_instance("control", control, SyncControl, "a SyncControl")
    _CONTROLS.insert(0, control)


def is_registered(control: SyncControl) -> bool:
    """Return whether a caller has registered it."""
    return not any(control is one for one in _BUILT_IN)


def control_of(module: nn.Module) -> SyncControl | None:
    """Return the switch of the engine whose module this is."""
    return next((control for control in _CONTROLS if control.matches(module)), None)


class Synchronized:
    """A module whose engine synchronizes its gradients, as its caller has switched it when this object was made."""

    def __init__(self, module: nn.Module, control: SyncControl) -> None:
        self.module, self.control = module, control
        self._recalled = nullcontext if control.recall is None else control.recall(module)
        self.hides = control.hides is not None and control.hides(module)

    def hold(self) -> AbstractContextManager[None]:
        """Return a context in which it does not synchronize."""
        return nullcontext() if self.control.hold is None else self.control.hold(self.module)

    def release(self) -> AbstractContextManager[None]:
        """Return a context in which it synchronizes, unless its caller has switched that off."""
        return self._recalled()

    def coalesce(self) -> AbstractContextManager[None]:
        """Return a context for all of a step's passes."""
        return nullcontext() if self.control.coalesce is None else self.control.coalesce(self.module)


def synchronized(modules: Iterable[nn.Module]) -> list[Synchronized]:
    """Return the outermost modules among these and their children that an engine synchronizes, each once."""
    found = {id(one.module): one for module in modules for one in _outermost(module)}
    return [*found.values()]


def _outermost(module: nn.Module) -> list[Synchronized]:
    control = control_of(module)
    if control is not None:
        return [Synchronized(module, control)]
    return [found for child in module.children() for found in _outermost(child)]


def modules_of(*objects: object) -> list[nn.Module]:
    """Return the modules among these, and in functions' closures and globals, objects and containers among these.

    From these ranks know, before any call, whether passes are collective. The calls of a function are observed later.
    """
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    level: list[object] = [*objects]
    for _ in range(_DEPTH):
        level = [x for x in level if id(x) not in seen and not isinstance(x, str | bytes | int | float | type)][:_MANY]
        seen.update(map(id, level))
        found |= {id(x): x for x in level if isinstance(x, nn.Module)}
        level = [inner for x in level if not isinstance(x, nn.Module) for inner in _within(x)]
    return [*found.values()]


def _within(x: Any) -> Iterable[object]:
    """Return the objects that an object refers to."""
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, types.FunctionType):
        unwrapped = inspect.unwrap(x)
        cells = [cell.cell_contents for cell in x.__closure__ or () if _filled(cell)]
        return [*cells, *_globals_of(x.__code__, x.__globals__), *([] if unwrapped is x else [unwrapped])]
    if isinstance(x, Mapping):
        return list(x.values()) if len(x) <= _MANY else []
    if isinstance(x, list | tuple | set | frozenset):
        return list(x) if len(x) <= _MANY else []
    return list(vars(x).values()) if hasattr(x, "__dict__") and not isinstance(x, types.ModuleType) else []


def _globals_of(code: types.CodeType, names: Mapping[str, object]) -> list[object]:
    """Return the globals that a function and its inner functions name; of Python modules, the named attributes."""
    found = []
    for name in code.co_names:
        x = names.get(name)
        if isinstance(x, types.ModuleType):
            found += [vars(x).get(inner) for inner in code.co_names]
        else:
            found.append(x)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _globals_of(constant, names)
    return found


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
