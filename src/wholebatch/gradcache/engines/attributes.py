"""Attributes of an engine that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def with_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside; afterward it has those that it had."""
    before = {name: vars(owner).get(name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
