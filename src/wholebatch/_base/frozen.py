"""Objects that the garbage collector does not search, because they are frozen, and the oldest one that it does."""

from __future__ import annotations

import gc

oldest: list[type] = []
"""Refers to the classes of the last `freeze`. Where the collector finds it, it finds all objects that are younger."""


def freeze(*classes: type) -> None:
    """Freeze all objects."""
    global oldest  # noqa: PLW0603
    gc.freeze()
    oldest = [*classes]
