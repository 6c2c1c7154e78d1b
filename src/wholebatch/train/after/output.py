"""Lines of output."""

from __future__ import annotations


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
