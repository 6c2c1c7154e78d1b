"""Warnings at a line of the user."""

import sys
import warnings


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line outside of this package and of torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("wholebatch", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
