"""How an engine is kept from synchronizing gradients before a step's last backward pass.

A step makes a backward pass for every chunk, and an engine would synchronize in each. It is told not to, but for the
last chunk of its module. When it listens differs:

    engine                       switch                                looks at it             passes
    DDP                          no_sync()                             in the forward pass     each rank its own
    FSDP2 (fully_shard)          set_requires_gradient_sync(False)     in the backward pass    collective
    FSDP1, DeepSpeed, and so on  no_sync()                             in the backward pass    collective

Passes are collective where parameters are gathered for them: all ranks then make the same ones. What the caller has
switched off stays off.

Wrappers (of accelerate, Fabric, torch.compile) hold such a module among their children, where it is found: only what a
module's class says of itself counts, not what a wrapper passes on.
`register_sync_control` adds an engine.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._checks import check_callable, check_choice, check_flag, check_instance

_SWITCHES = ("reduce_grads", "all_reduce_grads")  # of FSDP2's groups of parameters
_ACCUMULATED = "unsharded_accumulated_grad"  # of FSDP2's parameters
_DEPTH, _MANY = 6, 1000  # how far, and among how many objects, a function's modules are looked for


@dataclass(frozen=True)
class SyncControl:
    """An engine's switch.

    Args:
        matches: whether a module is one of this engine's.
        hold: a context in which the module's passes leave gradients on their rank.
        decides: the pass in which the engine looks at its switch.
        collective: whether all ranks have to make the same passes.
        remember: looks at gradients that the engine keeps to itself until it synchronizes; what it returns puts them
            back. None: it keeps none, they are the parameters' own.
        check: raises ValueError if the module's settings do not go with several backward passes.
        awaits: the parameters without whose gradients the engine does not finish its synchronization. Those that the
            last backward pass does not reach get zeros in it. None: it finishes anyway.
        sharded: whether each rank holds a part of the module's parameters, so that they are not compared.
    """

    matches: Callable[[nn.Module], bool]
    hold: Callable[[Any], AbstractContextManager[None]]
    decides: Literal["forward", "backward"] = "backward"
    collective: bool = True
    remember: Callable[[Any], Callable[[], None]] | None = None
    check: Callable[[Any], None] | None = None
    awaits: Callable[[Any], Iterable[Tensor]] | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        for name in ("matches", "hold", "remember", "check", "awaits"):
            if getattr(self, name) is not None or name in ("matches", "hold"):
                check_callable(name, getattr(self, name))
        check_choice("decides", self.decides, ("forward", "backward"))
        check_flag("collective", self.collective)
        check_flag("sharded", self.sharded)


def _no_sync(module: Any) -> AbstractContextManager[None]:
    held: AbstractContextManager[None] = module.no_sync()
    return held


def _check_ddp(module: Any) -> None:
    if module.static_graph:
        raise ValueError(
            "DistributedDataParallel(static_graph=True) takes every backward pass for the only one, and does not go "
            "with chunks; leave static_graph out"
        )


def parameters_of_ddp(module: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """The parameters whose gradients a DistributedDataParallel reduces, with their names in what it wraps."""
    ignored = getattr(module, "parameters_to_ignore", ())
    return ((name, p) for name, p in module.module.named_parameters() if p.requires_grad and name not in ignored)


def _awaited_by_ddp(module: Any) -> Iterable[Tensor]:
    """All of its parameters, unless it finds out by itself which are not used."""
    return () if module.find_unused_parameters else (p for _, p in parameters_of_ddp(module))


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where this has not been imported, no module is of FSDP1
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def _shards_of(module: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters in a module. Their switches and gradients have no public names.

    None where a release of torch has other names than those that are known here.
    """
    groups: list[Any] = []
    for inner in module.modules():
        if hasattr(type(inner), "set_requires_gradient_sync"):
            state: Any = getattr(inner, "_get_fsdp_state", lambda: None)()
            several = getattr(state, "_fsdp_param_groups", None)  # in newer releases of torch
            groups += [getattr(state, "_fsdp_param_group", None)] if several is None else several
    return [group for group in groups if all(hasattr(group, name) for name in (*_SWITCHES, "fsdp_params"))]


@contextmanager
def _hold_fully_sharded(module: Any) -> Iterator[None]:
    before = [(group, name, getattr(group, name)) for group in _shards_of(module) for name in _SWITCHES]
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        if not before:  # all that a public name can do; it forgets what the caller has switched off
            module.set_requires_gradient_sync(True)
        for group, name, switch in before:
            setattr(group, name, switch)


def _remember_fully_sharded(module: Any) -> Callable[[], None]:
    """Gradients of whole parameters, which accumulate before they are reduced to shards.

    They are in the whole parameter's `grad`, and up to torch 2.14 in an attribute of their own, too. From 2.15 on that
    is a property which reads `grad`.
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
        _no_sync,
        decides="forward",
        collective=False,
        check=_check_ddp,
        awaits=_awaited_by_ddp,
    ),
    SyncControl(
        lambda module: hasattr(type(module), "set_requires_gradient_sync"),
        _hold_fully_sharded,
        remember=_remember_fully_sharded,
        sharded=True,
    ),
    SyncControl(_is_fsdp1, _no_sync, sharded=True),
    SyncControl(lambda module: callable(getattr(type(module), "no_sync", None)), _no_sync),
]


_BUILT_IN = tuple(_CONTROLS)


def register_sync_control(control: SyncControl) -> None:
    """Let gradient caching know another engine; it is asked before those that are there.

    The first step checks that gradients stay in `.grad` while `hold` is entered, unless the control has `remember`: a
    `hold` that does nothing is an error.

    Raises:
        ValueError: if control is no :class:`SyncControl`.
    """
    check_instance("control", control, SyncControl, "a SyncControl")
    _CONTROLS.insert(0, control)


def is_registered(control: SyncControl) -> bool:
    """Whether it was registered, and is not one of ours."""
    return not any(control is one for one in _BUILT_IN)


def control_of(module: nn.Module) -> SyncControl | None:
    """The switch of the engine whose module this is."""
    return next((control for control in _CONTROLS if control.matches(module)), None)


@dataclass(frozen=True)
class Synchronized:
    """A module whose engine synchronizes its gradients."""

    module: nn.Module
    control: SyncControl

    def hold(self) -> AbstractContextManager[None]:
        """A context in which it does not."""
        return self.control.hold(self.module)


def synchronized(modules: Iterable[nn.Module]) -> list[Synchronized]:
    """The outermost modules among these and their children that an engine synchronizes, each once."""
    found = {id(one.module): one for module in modules for one in _outermost(module)}
    return [*found.values()]


def _outermost(module: nn.Module) -> list[Synchronized]:
    control = control_of(module)
    if control is not None:
        return [Synchronized(module, control)]
    return [found for child in module.children() for found in _outermost(child)]


def modules_of(*objects: object) -> list[nn.Module]:
    """The modules that these can see: themselves, what functions refer to, what objects and containers hold.

    By this, and before anything is called, ranks know whether passes are collective. Which modules a function calls is
    then observed.
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
    """What an object refers to."""
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
    """The globals that a function names, and functions in it; of Python modules, what it names of them."""
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
