"""Checks of numbers among the arguments of losses with other libraries' signatures."""

from __future__ import annotations

import math
from typing import Any


def checked_positive(name: str, value: Any, fix: str = "") -> Any:
    """Return a positive number; `fix` ends the error.

    Raises:
        ValueError: if it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}{fix}")
    return value


def checked_size(name: str, value: Any, *, optional: bool = True) -> Any:
    """Return a number of rows or tokens; None where it is optional.

    Raises:
        ValueError: if it is neither.
    """
    if value is None and optional:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer, at least 1, got {value!r}")
    return value
