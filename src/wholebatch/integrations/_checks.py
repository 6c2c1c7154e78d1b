"""Checks of arguments of losses with other libraries' signatures."""

from __future__ import annotations

import math
from typing import Any

import wholebatch as wb

from .._base.checks import check_flag
from ..comm import Group


def checked_positive(name: str, value: Any, fix: str = "") -> Any:
    """Return a positive number, or raise ValueError; `fix` ends the error."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}{fix}")
    return value


def checked_size(name: str, value: Any, *, optional: bool = True) -> Any:
    """Return a number of rows or tokens, None where it is optional, or raise ValueError."""
    if value is None and optional:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer, at least 1, got {value!r}")
    return value


def checked_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return one of the choices, or raise ValueError."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def check_no_progress_bar(value: bool) -> None:
    """Raise ValueError for a progress bar."""
    if value:
        raise ValueError(
            "show_progress_bar must be False, got True: chunks have no progress bar; the trainer's own shows steps"
        )


def checked_gathering(name: str, gathers: object, group: Group) -> bool:
    """Return whether processes share the batch, in frameworks that compare the rows of one process by default.

    Args:
        name: the framework's name of the argument.
        gathers: its value.
        group: the processes that would share the batch.

    Raises:
        ValueError: if it is no boolean, or is False beside a group.
    """
    if not check_flag(name, gathers) and group is not None:
        raise ValueError(
            f"{name}=False compares the rows of one process, so it does not go with group=; leave one of them out"
        )
    return bool(gathers)


def group_of_batch(gathers: bool, group: Group) -> Group:
    """Return the processes whose rows are compared."""
    return group if gathers else wb.comm.LocalCommunicator()
