"""The processes that a launcher has started, read from environment variables. This module imports no torch."""

from __future__ import annotations

import os

from ._settings import between

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables with the number of processes: of Open MPI; of MPICH and its relatives."""
LAUNCHED_SIZES = ("WORLD_SIZE", *MPI_SIZES)
"""The same, and torchrun's."""


def launched_processes(variable: str) -> int:
    """Return the number of processes that a launcher has started, from an environment variable; 1 if it is not set.

    Raises:
        ValueError: if it is no such number.
    """
    fix = "a launcher sets it to the number of its processes; unset it where there is no launcher"
    return environment_integer(variable, least=1, fix=fix) or 1


def environment_integer(variable: str, *, least: int, most: int | None = None, fix: str) -> int | None:
    """Read an integer that a launcher has written into an environment variable; None if it is not set.

    Raises:
        ValueError: the variable holds no such integer; `fix` ends the message.
    """
    if variable not in os.environ:
        return None
    text = os.environ[variable].strip()
    value = int(text) if text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 10 else None
    if value is None or value < least or (most is not None and value > most):
        accepted = f"an integer{between(least, most)}"
        raise ValueError(f"the environment variable {variable} must be {accepted}, got {text!r}; {fix}")
    return value
