"""A text that two functions share only if they compute alike: ranks that run different versions of a loss then raise.

It is made of bytecode, nested constants, defaults, and the plain values that a function captures or finds in its
module. Addresses, paths and line numbers are left out: they differ between ranks that run the same program.

Most functions read nothing else. Others may change while their text stays: objects, other modules, what they import.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_DEEPEST = 8  # functions that call functions
_LONGEST, _SOME = 1000, 100  # items of a list, and of those the first and the last
_IN_PART = "seen in part"  # in the text of a value that may compute otherwise while the text stays
_FIXED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_BUILTINS = {"abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "map"}
_BUILTINS |= {"max", "min", "pow", "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "zip"}
_BUILTINS |= {"ValueError", "TypeError", "RuntimeError"}


def fingerprint(*values: object) -> str:
    """Return a digest of functions and plain values."""
    return fingerprint_and_certainty(*values)[0]


def fingerprint_and_certainty(*values: object) -> tuple[str, bool]:
    """Return a digest of functions and plain values, and whether these compute alike as long as it is the same."""
    text = repr([_text(value, _DEEPEST, frozenset()) for value in values])
    return sha256(text.encode()).hexdigest()[:16], _IN_PART not in text


def _text(value: object, depth: int, within: frozenset[int]) -> Any:
    """Return something whose repr stands for the value; `within` are the ids of functions that are being described."""
    if type(value) is types.FunctionType and _reads_arguments_alone(value):
        return _code(value.__code__, depth)
    if isinstance(value, _PLAIN):
        return _exactly(value, _PLAIN, repr(value))
    if id(value) in within:
        return type(value).__qualname__
    if depth == 0:
        return [_IN_PART, type(value).__qualname__]
    inside = within | {id(value)}
    if isinstance(value, tuple | list) and len(value) > _LONGEST:
        return [_IN_PART, len(value), *(_text(item, depth - 1, inside) for item in (*value[:_SOME], *value[-_SOME:]))]
    if isinstance(value, tuple | list):
        return _exactly(value, (tuple, list), [_text(item, depth - 1, inside) for item in value])
    if isinstance(value, set | frozenset):
        return _exactly(value, (set, frozenset), sorted(repr(_text(item, depth - 1, inside)) for item in value))
    if isinstance(value, Mapping):
        items = [(repr(key), _text(item, depth - 1, inside)) for key, item in value.items()]
        return _exactly(value, (dict,), items)
    if isinstance(value, functools.partial):
        return ["partial", *(_text(part, depth - 1, inside) for part in (value.func, value.args, value.keywords))]
    if isinstance(value, types.MethodType):
        read = _looked_up(value.__func__.__code__) if isinstance(value.__func__, types.FunctionType) else frozenset()
        owner = _attributes(value.__self__, read, depth - 1, inside)
        return [_IN_PART, "method", _text(value.__func__, depth - 1, inside), owner]
    if isinstance(value, types.FunctionType):
        return _function(value, depth - 1, inside)
    if isinstance(value, types.CodeType):
        return _code(value, depth - 1)
    if isinstance(value, types.ModuleType):
        return value.__name__ if _is_fixed(value.__name__) else [_IN_PART, value.__name__]
    if isinstance(value, Tensor):
        return [_IN_PART, type(value).__qualname__]
    if isinstance(value, nn.Module):
        named = [(name, _text(x, depth - 1, inside)) for name, x in value.state_dict().items()]
        forward = type(value).forward
        read = _looked_up(forward.__code__) if isinstance(forward, types.FunctionType) else frozenset()
        return [_IN_PART, type(value).__qualname__, named, value.extra_repr(), _attributes(value, read, depth, within)]
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    bound = getattr(value, "__self__", None)  # of a builtin; of torch's functions, a class
    if isinstance(value, _FIXED) and isinstance(bound, types.ModuleType | type | None):
        return name
    if isinstance(value, type) and _is_fixed(value.__module__):
        return name
    own = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
    plain = {key: x for key, x in own.items() if isinstance(x, (*_PLAIN, tuple))}
    call = None if isinstance(value, type) else vars(type(value)).get("__call__")
    code = [_text(call, depth - 1, inside)] if isinstance(call, types.FunctionType) else []
    return [_IN_PART, name, _text(plain, depth - 1, inside), *code]


def _exactly(value: object, kinds: tuple[type, ...], text: Any) -> Any:
    """Return the text of a value, marked unless its type is one of these: a subclass may have methods of its own."""
    return text if type(value) in kinds else [_IN_PART, text]


def _is_fixed(module: str) -> bool:
    """Return whether everything that a module holds stays as it is."""
    return module.split(".")[0] in ("torch", "math", "builtins")


def _reads_arguments_alone(function: types.FunctionType) -> bool:
    outside = function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function)
    return not outside and _looks_nothing_up(function.__code__, function.__globals__.get("__name__", ""))


@functools.lru_cache(1024)
def _looks_nothing_up(code: types.CodeType, module: str) -> bool:
    return not (_names(code) or _imports(code) or _is_fixed(module))


def _function(function: types.FunctionType, depth: int, within: frozenset[int]) -> Any:
    if _is_fixed(function.__globals__.get("__name__", "")):
        return function.__qualname__
    code = function.__code__
    contents = [_content(cell) for cell in function.__closure__ or ()]
    names = {name: function.__globals__[name] for name in sorted(_names(code)) if name in function.__globals__}
    captured = [_text(content, depth, within) for content in contents]
    read_globals = [(name, _text(value, depth, within)) for name, value in names.items()]
    attributes = [_attributes(value, _looked_up(code), depth, within) for value in (*contents, *names.values())]
    defaults = _text([function.__defaults__, function.__kwdefaults__], depth, within)
    read_elsewhere = _imports(code) or not _names(code) <= {*names, *_BUILTINS} or vars(function)
    elsewhere = [_IN_PART] if read_elsewhere else []
    return [_code(code, depth), captured, read_globals, defaults, attributes, *elsewhere]


def _attributes(value: object, names: frozenset[str], depth: int, within: frozenset[int]) -> list[Any]:
    """Return the attributes that a function may read of an object which it has captured: those of these names."""
    if isinstance(value, types.ModuleType):
        return [(name, repr(x)) for name in sorted(names) if isinstance(x := vars(value).get(name), _PLAIN)]
    if depth == 0 or id(value) in within or isinstance(value, types.FunctionType | type | Tensor):
        return []
    inside, described = within | {id(value)}, list[Any]()
    own = {**getattr(value, "__dict__", {}), **getattr(value, "_modules", {})}
    for name in sorted(names & own.keys()):
        attribute = own[name]
        if isinstance(attribute, (*_PLAIN, tuple, list, set, frozenset, Mapping)):
            described.append((name, _text(attribute, depth - 1, inside)))
        else:
            described.append((name, _attributes(attribute, names, depth - 1, inside)))
    return described


@functools.lru_cache(1024)
def _looked_up(code: types.CodeType) -> frozenset[str]:
    """Return all names that a function and those inside of it look up, those of attributes as well."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*map(_looked_up, inner))


@functools.lru_cache(1024)
def _code(code: types.CodeType, depth: int) -> list[Any]:
    constants = [_text(constant, depth, frozenset()) for constant in code.co_consts]
    return [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars]


@functools.lru_cache(1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the global names that a function and those inside of it look up."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    loaded = frozenset[str]() | {
        op.argval for op in dis.get_instructions(code) if op.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return loaded.union(*map(_names, inner))


@functools.lru_cache(1024)
def _imports(code: types.CodeType) -> bool:
    """Return whether a function or one inside of it imports."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return any(op.opname == "IMPORT_NAME" for op in dis.get_instructions(code)) or any(map(_imports, inner))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def captured(function: object, tensor: Tensor) -> str:
    """Return where a function has found a tensor that it did not receive, in words; "" if nobody can tell."""
    if isinstance(function, functools.partial):
        for name, value in [*enumerate(function.args), *function.keywords.items()]:
            if value is tensor:
                return f"{name!r} of a functools.partial"
        return captured(function.func, tensor)
    if isinstance(function, nn.Module):
        named = [*function.named_parameters(), *function.named_buffers()]
        return next((f"{name!r} of a {type(function).__name__}" for name, x in named if x is tensor), "")
    if isinstance(function, types.MethodType):
        owner = function.__self__
        for name, value in {**getattr(owner, "__dict__", {}), **getattr(owner, "_parameters", {})}.items():
            if value is tensor:
                return f"'self.{name}'"
        return captured(function.__func__, tensor) or captured(owner, tensor)
    if not isinstance(function, types.FunctionType):
        return next((f"{name!r}" for name, value in getattr(function, "__dict__", {}).items() if value is tensor), "")
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: _content(cell) for name, cell in cells}
    values |= {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    values |= {f"default {number}": value for number, value in enumerate(function.__defaults__ or ())}
    for name, value in values.items():
        if value is tensor:
            return f"{name!r}"
    for name, value in values.items():
        for attribute, x in getattr(value, "__dict__", {}).items() if not isinstance(value, types.ModuleType) else ():
            if x is tensor:
                return f"'{name}.{attribute}'"
        inside = (
            captured(value, tensor)
            if isinstance(value, types.FunctionType | nn.Module) and value is not function
            else ""
        )
        if inside:
            return inside
    return ""
