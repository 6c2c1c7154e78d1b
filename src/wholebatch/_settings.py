"""Checks of arguments that are no tensors: flags, numbers, names, functions. This module imports no torch.

One rule for all of them. A flag is True or False and nothing that merely has a truth value. An integer is a Python
int, a number is a Python int or float (and what is derived from them, such as numpy.float64); a bool is neither.
NaN, infinity, and what float32 cannot hold, are refused wherever a number is asked for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
_MOST = 2**63  # what no computer counts to
LARGEST, LEAST = 3.4028234663852886e38, 1e-30  # number of float32; what a similarity is divided by
_SHOWN = 80  # characters of a value in a message


def shown(value: object) -> str:
    """A value as it stands in a message: its type and shape if it is an array, else its representation, cut short."""
    shape, dtype = getattr(type(value), "shape", None), getattr(type(value), "dtype", None)
    if shape is not None and dtype is not None:
        return f"{type(value).__name__} of {getattr(value, 'dtype', 'unknown dtype')}"
    try:
        text = repr(value)
    except Exception:  # a message about a value must not fail because the value cannot be shown
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_flag(name: str, value: object) -> bool:
    """value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")
    return value


def check_integer(name: str, value: object, *, least: int | None = None, most: int | None = None, of: str = "") -> int:
    """value is an int from `least` to `most`, both included; `of` says in a message what it counts."""
    wanted = f"an integer{_between(least, most)}{f', {of}' if of else ''}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be {wanted}; got {shown(value)}{_as_python(value, 'int')}")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name} must be {wanted}; got {shown(value)}")
    return value


def check_count(name: str, value: object, of: str) -> int:
    """value is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < _MOST:
        raise ValueError(f"{name} must be a positive integer, {of}; got {shown(value)}{_as_python(value, 'int')}")
    return value


def check_real(name: str, value: object, *, or_: str = "") -> float:
    """value is an int or a float; returns it as a float, which is infinite for an int that no float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        got = "a tensor; it is not learned" if hasattr(type(value), "requires_grad") else type(value).__name__
        raise ValueError(f"{name} must be a number{or_}, got {got}{_as_python(value, 'float')}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_number(name: str, value: object) -> float:
    """value is a finite number, and one that float32 holds: what is larger would overflow in the first product."""
    number = check_real(name, value)
    if not abs(number) <= LARGEST:
        finite = "within the range of float32" if math.isfinite(number) else "finite"
        raise ValueError(f"{name} must be {finite}, got {shown(value)}")
    return number


def check_positive_number(name: str, value: object, why: str) -> float:
    """value is a finite number above 0."""
    number = check_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {shown(value)}; {why}")
    return number


def check_weight(name: str, value: object, why: str) -> float:
    """value is a finite number, 0 or more."""
    number = check_number(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {shown(value)}; {why}")
    return number


def check_fraction(name: str, value: object, *, below_one: bool = False) -> float:
    """0 <= value <= 1, or < 1."""
    number = check_number(name, value)
    if not (0 <= number < 1 or (number == 1 and not below_one)):
        raise ValueError(f"{name} must lie in [0, 1{')' if below_one else ']'}, got {shown(value)}")
    return number


def check_label_smoothing(value: object) -> float:
    """0 <= label_smoothing <= 1."""
    return check_fraction("label_smoothing", value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """value is one of the named choices; returns it."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {shown(value)}")
    return value


def check_memory(value: object) -> None:
    """value is "auto", "flat" or a number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value <= 0:
            raise ValueError(f"memory must be 'auto', 'flat' or a positive number of bytes, got {shown(value)}")
    elif not isinstance(value, str) or value not in ("auto", "flat"):
        raise ValueError(f"memory must be one of 'auto', 'flat', or a number of bytes, an int; got {shown(value)}")


def check_callable(name: str, value: object) -> Any:
    """value can be called; returns it."""
    if not callable(value):
        raise ValueError(f"{name} must be callable, got {type(value).__name__}")
    return value


def check_instance(name: str, value: object, of: type[_T] | tuple[type[Any], ...], what: str) -> Any:
    """value is an instance; returns it."""
    if not isinstance(value, of):
        raise ValueError(f"{name} must be {what}, got {shown(value)}")
    return value


def checked_path(name: str, value: object) -> Path:
    """The path that is meant: a string that names a file or a folder, or a pathlib.Path."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError(f"{name} must be a path, a string or a pathlib.Path; got {shown(value)}")
    return Path(value)


def check_sequence(name: str, value: object, what: str) -> list[Any]:
    """value is a list, a tuple or the like, no string; returns its items."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"{name} must be a list or tuple of {what}, got {shown(value)}")
    return [*value]


def check_items(name: str, value: object, what: str) -> list[Any]:
    """value can be gone through, and is no string, mapping or single tensor; returns its items."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | dict) or hasattr(type(value), "dtype"):
        raise ValueError(f"{name} must be a list of {what}, got {shown(value)}")
    return [*value]


def environment_integer(variable: str, *, least: int, most: int | None = None, fix: str) -> int | None:
    """The integer that a launcher has written into an environment variable; None if that is not set.

    Raises:
        ValueError: if it is no such integer; `fix` ends the message.
    """
    if variable not in os.environ:
        return None
    text = os.environ[variable].strip()
    value = int(text) if text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 10 else None
    if value is None or value < least or (most is not None and value > most):
        wanted = f"an integer{_between(least, most)}"
        raise ValueError(f"the environment variable {variable} must be {wanted}, got {text!r}; {fix}")
    return value


def _between(least: int | None, most: int | None) -> str:
    if least is None:
        return "" if most is None else f" of at most {most}"
    return f" of at least {least}" if most is None else f" from {least} to {most}"


def _as_python(value: object, kind: str) -> str:
    """How to pass the number that an array library has wrapped."""
    of = type(value)
    wrapped = hasattr(of, "dtype") and hasattr(of, "item") and not hasattr(of, "requires_grad")
    return f"; pass {kind}(...) of it" if wrapped else ""
