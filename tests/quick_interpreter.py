"""Triton's interpreter, quicker: most of its time goes to types and shapes that it makes again for each operation.

NumPy computes the same numbers from the same program.
"""

from __future__ import annotations

import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter

BLOCK, SEMANTIC = tl.core.block_type, type(interpreter.interpreter_semantic)


def use() -> None:
    """Make the interpreter of this process quick."""
    for owner, name, make in (
        (interpreter, "_patch_lang", replaced_once),
        (interpreter, "_patch_builtin", replaced_by_functions),
        (interpreter, "_get_np_dtype", numpy_type),
        (BLOCK, "__init__", block),
        (BLOCK, "with_element_ty", block_of),
        (BLOCK, "to_ir", same_in_numpy),
        (tl.core.tensor, "__init__", tensor),
        (tl.core.dtype, "__eq__", same_type),
        (tl.core.tuple, "__eq__", same_shape),
        (SEMANTIC, "computation_type_impl", computation_type),
        (SEMANTIC, "cast", cast),
        (SEMANTIC, "broadcast_impl_value", broadcast),
        (SEMANTIC, "binary_op_sanitize_overflow_impl", nothing),
    ):
        setattr(owner, name, make(getattr(owner, name)))
    BLOCK.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda *_: None)


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
    found = {}

    def replacement(member):
        function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

        def replaced(*args, **named):
            named["_semantic"] = semantic
            return function(*args, **named)

        return replaced

    def replace_builtins(owner, builder, scope):
        if owner not in found:
            members = inspect.getmembers(owner, tl.core.is_builtin)
            found[owner] = [(name, replacement(member)) for name, member in members]
        for name, replaced in found[owner]:
            scope.set_attr(owner, name, replaced)

    return replace_builtins


def numpy_type(find):
    found = {}

    def known(type):
        scalar = type.scalar
        if scalar.name not in found:
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


def block_of(make):
    def known_block(self, element_ty):
        blocks = self.__dict__.setdefault("blocks", {})
        if element_ty.name not in blocks:
            blocks[element_ty.name] = make(self, element_ty)
        return blocks[element_ty.name]

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


def computation_type(find):
    found = {}

    def known(self, a, a_is_scalar, b, b_is_scalar, *more):
        key = a.name, a_is_scalar, b.name, b_is_scalar, *more
        if key not in found:
            found[key] = find(self, a, a_is_scalar, b, b_is_scalar, *more)
        return found[key]

    return known


def same_type(equal):
    return lambda self, other: self is other or equal(self, other)


def same_shape(equal):
    return lambda self, other: self.values == other if type(other) is list else self is other or equal(self, other)


def cast(convert):
    def convert_if_needed(self, x, to, *more):
        return x if x.type.scalar is to.scalar else convert(self, x, to, *more)

    return convert_if_needed


def broadcast(make):
    def make_if_needed(self, a, b):
        shape = a.type.is_block() and a.type.shape
        return (a, b) if shape is (b.type.is_block() and b.type.shape) else make(self, a, b)

    return make_if_needed


def nothing(_):
    """Sums of integers are not computed again in 64 bits, for an assertion that only a debug build makes."""
    assert not interpreter.interpreter_builder.options.debug
    return lambda *_: None
