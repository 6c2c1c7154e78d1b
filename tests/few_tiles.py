"""A calibration with few tiles, in the processes of ranks: they import this module by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_few_tiles(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function after the planner's calibration has been shortened in this process."""
    from wholebatch.planning import calibration

    calibration._TILES, calibration._REPEATS, calibration._LONG_ENOUGH = {"cpu": (2, 1)}, 1, 1e7
    return fn(*arguments)
