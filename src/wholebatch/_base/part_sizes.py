"""How much is computed at a time, where a constant says so: tiles, rows, numbers.

The planner counts a step of few rows, in which parts are smaller still, so that they are as many kinds of memory as in
a large step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_SMALLER: ContextVar[Mapping[str, int] | None] = ContextVar("smaller parts", default=None)


def part_size(name: str, usual: int) -> int:
    """Return the size of a part: the usual one, or inside `smaller_parts` another."""
    smaller = _SMALLER.get()
    return usual if smaller is None else smaller.get(name, usual)


@contextmanager
def smaller_parts(sizes: Mapping[str, int]) -> Iterator[None]:
    """Replace the sizes of parts, by their names, inside."""
    token = _SMALLER.set(sizes)
    try:
        yield
    finally:
        _SMALLER.reset(token)
