"""Checks of arguments that are no tensors: flags, numbers, names, functions. This module imports no torch.

The same rules hold for all of them. A flag is True or False, not a value with a truth value. An integer is a Python
int, a number is a Python int or float (or a subclass, such as numpy.float64); a bool is neither. NaN, infinity and
numbers beyond float32 are refused wherever a number is expected. An error names the argument, the accepted values, the
given value, and the likely fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .spelling import did_you_mean

_T = TypeVar("_T")
_MOST = 2**63  # beyond any count
LARGEST = 3.4028234663852886e38  # number of float32
SMALLEST_DIVISOR = 1e-30  # of similarities
_SHOWN = 80  # characters of a value in a message


def shown(value: object) -> str:
    """Return the text of a value for a message: its type and dtype if it is an array, else its repr, cut short."""
    if is_dtensor(value):
        return "a DTensor; pass x.to_local(), this rank's rows"
    if _is_array(value):
        name, dtype = type(value).__name__, str(getattr(value, "dtype", "unknown dtype"))
        return name if name == dtype else f"{name} of {dtype}"  # a scalar of NumPy has its dtype's name
    try:
        text = repr(value)
    except Exception:  # a message about a value must not fail because the value cannot be shown
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shown_with_type(value: object) -> str:
    """Return the text of a value for a message about its type."""
    return shown(value) if value is None or _is_array(value) else f"{shown(value)} ({type(value).__name__})"


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor, whose module takes long to import."""
    return hasattr(value, "device_mesh") and _is_array(value)


def _is_array(value: object) -> bool:
    return all(getattr(type(value), name, None) is not None for name in ("shape", "dtype"))


def check_flag(name: str, value: object) -> bool:
    """Return value if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")
    return value


def check_label(smallest: int) -> None:
    """Raise ValueError if the smallest label of a batch is negative: rows without a class would be one."""
    if smallest < 0:
        raise ValueError(f"labels must not be negative, got {smallest}; name it as ignore_index= to leave its rows out")


def check_integer(
    name: str, value: object, *, minimum: int | None = None, maximum: int | None = None, detail: str = ""
) -> int:
    """Return value if it is an int from `minimum` to `maximum`; `detail` says in errors what it is."""
    accepted = f"an integer{between(minimum, maximum)}{f', {detail}' if detail else ''}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be {accepted}; got {shown(value)}{_cast_hint(value, 'int')}")
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        raise ValueError(f"{name} must be {accepted}; got {shown(value)}")
    return value


def check_count(name: str, value: object, counted: str) -> int:
    """Return value if it is a positive integer; `counted` names the counted things in errors."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < _MOST:
        raise ValueError(f"{name} must be a positive integer, {counted}; got {shown(value)}{_cast_hint(value, 'int')}")
    return value


def check_real(name: str, value: object, *, or_: str = "") -> float:
    """Return value as a float if it is an int or a float; infinity for an int that no float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        is_tensor = hasattr(type(value), "requires_grad")
        got = "a tensor; it is not learned" if is_tensor else shown_with_type(value)
        raise ValueError(f"{name} must be a number{or_}, got {got}{_cast_hint(value, 'float')}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_number(name: str, value: object, *, fix: str = "check how it was computed", or_: str = "") -> float:
    """Return value as a float if it is finite and within float32's range, beyond which the first product overflows."""
    number = check_real(name, value, or_=or_)
    if not abs(number) <= LARGEST:
        finite = "within the range of float32" if math.isfinite(number) else "finite"
        raise ValueError(f"{name} must be {finite}, got {shown(value)}; {fix}")
    return number


def check_positive_number(name: str, value: object, why: str, *, or_: str = "") -> float:
    """Return value as a float if it is a finite number above 0; `why` ends the error."""
    number = check_number(name, value, or_=or_)
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {shown(value)}; {why}")
    return number


def check_divisor(name: str, value: object) -> float:
    """Return value as a float if it is positive, and so large that similarities divided by it do not overflow."""
    number = check_positive_number(name, value, "similarities are divided by it")
    if number < SMALLEST_DIVISOR:
        raise ValueError(
            f"{name} must be at least {SMALLEST_DIVISOR}, got {shown(value)}; similarities are divided by it"
        )
    return number


def check_weight(name: str, value: object, why: str) -> float:
    """Return value as a float if it is a finite number, 0 or more; `why` ends the error."""
    number = check_number(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {shown(value)}; {why}")
    return number


def check_fraction(name: str, value: object, *, below_one: bool = False) -> float:
    """Return value as a float if 0 <= value <= 1, or, with `below_one`, 0 <= value < 1."""
    number = check_number(name, value)
    if not (0 <= number < 1 or (number == 1 and not below_one)):
        raise ValueError(f"{name} must lie in [0, 1{')' if below_one else ']'}, got {shown(value)}")
    return number


def check_label_smoothing(value: object) -> float:
    """Return label_smoothing as a float if it lies in [0, 1]."""
    return check_fraction("label_smoothing", value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return value if it is one of the named choices."""
    if not isinstance(value, str) or value not in choices:
        meant = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {shown(value)}{meant}")
    return value


def check_memory(value: object) -> None:
    """Raise ValueError unless value is "auto", "flat" or a positive number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value <= 0:
            raise ValueError(f"memory must be 'auto', 'flat' or a positive number of bytes, got {shown(value)}")
    elif not isinstance(value, str) or value not in ("auto", "flat"):
        raise ValueError(f"memory must be one of 'auto', 'flat', or a number of bytes, an int; got {shown(value)}")


def check_callable(name: str, value: object) -> Any:
    """Return value if it is callable."""
    if not callable(value):
        raise ValueError(f"{name} must be callable, got {shown_with_type(value)}")
    return value


def check_instance(name: str, value: object, kind: type[_T] | tuple[type[Any], ...], expected: str) -> Any:
    """Return value if it is an instance of the type, which `expected` describes in errors."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {expected}, got {shown(value)}")
    return value


def checked_path(name: str, value: object) -> Path:
    """Return value as a path if it is a string that names a file or a folder, or a pathlib.Path."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError(f"{name} must be a path, a string or a pathlib.Path; got {shown(value)}")
    return Path(value)


def check_sequence(name: str, value: object, expected: str) -> list[Any]:
    """Return the items of a list, a tuple or another sequence, but not of a string."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"{name} must be a list or tuple of {expected}, got {shown(value)}")
    return [*value]


def check_items(name: str, value: object, expected: str) -> list[Any]:
    """Return the items of an iterable, but not of a string, a mapping or a tensor."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | dict) or hasattr(type(value), "dtype"):
        raise ValueError(f"{name} must be a list of {expected}, got {shown(value)}")
    return [*value]


def between(minimum: int | None, maximum: int | None) -> str:
    """Return the range of an integer as words that follow "an integer"."""
    if minimum is None:
        return "" if maximum is None else f" of at most {maximum}"
    return f" of at least {minimum}" if maximum is None else f" from {minimum} to {maximum}"


def _cast_hint(value: object, kind: str) -> str:
    """Say how to pass a number that an array library has wrapped."""
    cls = type(value)
    wrapped = hasattr(cls, "dtype") and hasattr(cls, "item") and not hasattr(cls, "requires_grad")
    return f"; pass {kind}(...) of it" if wrapped else ""
