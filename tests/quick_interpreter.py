"""Triton's interpreter, quicker: most of its time goes to types and shapes that it makes again for each operation.

NumPy computes the same numbers from the same program. The server of rank processes imports this module, too.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys

import triton.language as tl
from triton.runtime import interpreter

BLOCK, SEMANTIC = tl.core.block_type, type(interpreter.interpreter_semantic)


def use() -> None:
    """Make the interpreter of this process quick."""
    for owner, name, make in (
        (interpreter.GridExecutor, "__call__", unobserved),
        (interpreter, "_patch_lang", replaced_once),
        (interpreter, "_patch_builtin", replaced_by_functions),
        (interpreter, "_get_np_dtype", numpy_type),
        (BLOCK, "__init__", block),
        (BLOCK, "to_ir", same_in_numpy),
        (tl.core.tensor, "__init__", tensor),
        (tl.core.dtype, "__eq__", same_type),
        (tl.core.tuple, "__eq__", same_shape),
        (SEMANTIC, "broadcast_impl_value", broadcast),
        (SEMANTIC, "binary_op_sanitize_overflow_impl", nothing),
    ):
        setattr(owner, name, make(getattr(owner, name)))
    BLOCK.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda *_: None)


def unobserved(launch):
    """A tracer or profiler of a test is not called for the thousands of calls of a kernel."""

    def launch_unobserved(*args, **named):
        trace, profile = sys.gettrace(), sys.getprofile()
        sys.settrace(None), sys.setprofile(None)
        try:
            return launch(*args, **named)
        finally:
            sys.settrace(trace), sys.setprofile(profile)

    return launch_unobserved


def replaced_once(replace):
    """The language is replaced at a launch, and not at each call of a device function once more."""

    @functools.cache
    def languages(function):
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def replace_once(function):
        return replace(function) if any(tl.core.is_builtin(language.load) for language in languages(function)) else None

    return replace_once


def replaced_by_functions(_):
    """Builtins are looked up once, and called without the wrapper that looks for their semantic."""

    def replacement(member):
        function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic
        return lambda *args, **named: function(*args, **{**named, "_semantic": semantic})

    @functools.cache
    def replacements(owner):
        return [(name, replacement(member)) for name, member in inspect.getmembers(owner, tl.core.is_builtin)]

    def replace_builtins(owner, builder, scope):
        for name, replaced in replacements(owner):
            scope.set_attr(owner, name, replaced)

    return replace_builtins


def numpy_type(find):
    found = {}

    def known(type):
        if (scalar := type.scalar).name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return known


def block(initialize):
    """A shape is checked once."""
    known = {}

    def known_block(self, element_ty, shape):
        if (sizes := known.get(key := (*shape,))) is None:
            initialize(self, element_ty, shape)
            known[key] = self.shape, self.numel
        else:
            self.element_ty, (self.shape, self.numel) = element_ty, sizes

    return known_block


def same_in_numpy(convert):
    """The interpreter's types are those of the language."""
    return lambda self, builder: self if builder is interpreter.interpreter_builder else convert(self, builder)


def tensor(initialize):
    """The constants of a shape are made once."""

    def of_known_shape(self, handle, type):
        known = (type.shape if type.is_block() else type).__dict__
        if (sizes := known.get("sizes")) is None:
            initialize(self, handle, type)
            known["sizes"] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype, (self.shape, self.numel) = handle, type, type.scalar, sizes

    return of_known_shape


def same_type(equal):
    return lambda self, other: self is other or equal(self, other)


def same_shape(equal):
    return lambda self, other: self.values == other if type(other) is list else self is other or equal(self, other)


def broadcast(make):
    def make_if_needed(self, a, b):
        shape = a.type.is_block() and a.type.shape
        return (a, b) if shape is (b.type.is_block() and b.type.shape) else make(self, a, b)

    return make_if_needed


def nothing(_):
    """Sums of integers are not computed again in 64 bits, for an assertion that only a debug build makes."""
    assert not interpreter.interpreter_builder.options.debug
    return lambda *_: None


if os.environ.get("TRITON_INTERPRET") == "1":
    use()
