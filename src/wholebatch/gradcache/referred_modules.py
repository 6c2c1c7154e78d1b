"""The modules that a model refers to, found without calling it.

From these ranks know, before any call, whether passes are collective. The calls of a function are observed later.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

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
