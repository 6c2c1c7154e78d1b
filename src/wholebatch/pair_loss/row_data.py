"""The objects x, y, p and r that a user's functions read: numbers by name, as attributes.

Numbers of rows are kept by name. Those that belong to one of several similarities have its name after a dot, and are
read as attributes of an attribute: "partner.student" is `x.partner.student`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .._base.spelling import did_you_mean

INDEX, PARTNER = "index", "partner"  # names that every side has, and no data may have
SQUARES, ROUNDING = "|x|^2", "|x y|"  # names that no user can choose
SEPARATOR = "."  # between a name of data and that of a similarity
_HINTS = {
    "x": "pass it in x_data",
    "y": "pass it in y_data, or in x_data where y is left out",
    "p": "pass it in parameters",
    "r": "name it among the terms",
    "s": "similarity must be a mapping with this name",
}


class FieldError(AttributeError):
    """A function read a name that its argument does not have."""


class Fields:
    """Numbers by name, as attributes: `x.label`, `p.alpha`, `r.positives`.

    Args:
        letter: the argument's name in the user's functions, for messages.
        values: the numbers.
        read: a set that gets the names that were read; None: they are not recorded.
    """

    __slots__ = ("_letter", "_read", "_values")

    def __init__(self, letter: str, values: Mapping[str, Any], read: set[str] | None = None) -> None:
        for name, value in (("_letter", letter), ("_values", values), ("_read", read)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            if self._read is not None:
                self._read.add(name)
            return self._values[name]
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(self._values) or "nothing"
        fix = did_you_mean(name, self._values) or f"; {_HINTS[self._letter]}"
        raise FieldError(f"{self._letter}.{name} does not exist: {self._letter} has {known}{fix}")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise FieldError(f"{self._letter}.{name} cannot be set: functions of a PairLoss only read their arguments")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return f"{self._letter} with {', '.join(self._values) or 'nothing'}"


def changed(numbers: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return numbers by name, each changed; those of several similarities one by one."""
    return {
        name: Fields("s", {key: change(x[key]) for key in x}) if isinstance(x, Fields) else change(x)
        for name, x in numbers.items()
    }


def nested(numbers: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return numbers as the user reads them, those of several similarities by name once more; and the squares."""
    plain, squares, several = dict[str, Any](), dict[str, Any](), dict[str, dict[str, Any]]()
    for name, x in numbers.items():
        stem, dot, similarity = name.partition(SEPARATOR)
        if stem == SQUARES:
            squares[similarity] = x
        elif dot:
            several.setdefault(stem, {})[similarity] = x
        else:
            plain[name] = x
    return plain | {name: Fields("s", values) for name, values in several.items()}, squares
