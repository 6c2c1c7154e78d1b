"""The names of pytorch-metric-learning that the losses use, imported in the first call that needs them."""

from __future__ import annotations

from typing import Any

from .._framework import Framework

METRIC_LEARNING = Framework("pytorch_metric_learning", ("2.9.0",), "pip install 'pytorch-metric-learning>=2.9'")


def their_class(module: str, name: str) -> Any:
    """Return one of their classes, `pytorch_metric_learning.<module>.<name>`.

    Raises:
        FrameworkError: if pytorch-metric-learning is missing, too old, or has no such class.
    """
    found = METRIC_LEARNING.load(f"pytorch_metric_learning.{module}")
    return getattr(found, METRIC_LEARNING.seam(found, name))


def is_theirs(value: object, name: str) -> bool:
    """Return whether a value is an instance of exactly that class of theirs, without an import of it."""
    kind = type(value)
    return kind.__name__ == name and kind.__module__.partition(".")[0] == "pytorch_metric_learning"
