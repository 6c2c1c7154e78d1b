"""A caller's wish for statistics of the loss that it calls, wherever in its code the loss is computed.

The wish is a context variable, so it passes through any layers in between, such as a :class:`wholebatch.GradCache` or a
trainer's wrapper, and the loss itself always returns a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_reports: ContextVar[list[Any] | None] = ContextVar("_reports", default=None)


@contextmanager
def collecting(reports: list[Any] | None) -> Iterator[None]:
    """Append the statistics of each loss that is computed inside; None: it is computed for another reason."""
    token = _reports.set(reports)
    try:
        yield
    finally:
        _reports.reset(token)


def statistics_requested() -> bool:
    """Return whether the loss that is being computed was called through `with_statistics`."""
    return _reports.get() is not None


def report(statistics: object) -> None:
    """Hand the statistics of a loss to the caller that has requested them."""
    reports = _reports.get()
    assert reports is not None
    reports.append(statistics)
