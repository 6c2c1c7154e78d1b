"""The processes that a launcher has started, read from environment variables. This module imports no torch."""

from __future__ import annotations

import os

from .._base.settings import between
from .._base.user_error import UserError

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables with the number of processes: of Open MPI; of MPICH and its relatives."""
LAUNCHED_SIZES = ("WORLD_SIZE", *MPI_SIZES)
"""The same, and torchrun's."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_processes(variable: str) -> int:
    """Return the number of processes that a launcher has started, from an environment variable; 1 if it is not set.

    Raises:
        ValueError: if it is no such number.
    """
    fix = "a launcher sets it to the number of its processes; unset it where there is no launcher"
    return environment_integer(variable, minimum=1, fix=fix) or 1


def launcher_size() -> int | None:
    """Return the number of ranks if torchrun, or a launcher with the same variables, has started this process.

    Raises:
        UserError: if the variables contradict each other, or some are missing for several ranks.
    """
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return None
    missing = [name for name in _VARIABLES if name not in os.environ]
    known_size = _integer("WORLD_SIZE", 1, None)
    size, rank = known_size or 1, _integer("RANK", 0, None if known_size is None else known_size - 1) or 0
    if missing and size == 1 and rank == 0:
        return None
    if missing:
        variables = ", ".join(f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ)
        raise UserError(
            f"{variables} means that a launcher has started several processes, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start with torchrun, which sets all of "
            f"{', '.join(_VARIABLES)}, or unset them"
        )
    _integer("LOCAL_RANK", 0, (_integer("LOCAL_WORLD_SIZE", 1, size) or 1) - 1)
    _integer("MASTER_PORT", 1, 65535)
    if not os.environ["MASTER_ADDR"].strip():
        raise UserError("MASTER_ADDR must be the address of the machine of rank 0, got ''")
    return size


def environment_integer(variable: str, *, minimum: int, maximum: int | None = None, fix: str) -> int | None:
    """Read an integer that a launcher has written into an environment variable; None if it is not set.

    Raises:
        ValueError: the variable holds no such integer; `fix` ends the message.
    """
    if variable not in os.environ:
        return None
    text = os.environ[variable].strip()
    value = int(text) if text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 10 else None
    if value is None or value < minimum or (maximum is not None and value > maximum):
        accepted = f"an integer{between(minimum, maximum)}"
        raise ValueError(f"the environment variable {variable} must be {accepted}, got {text!r}; {fix}")
    return value


def _integer(name: str, smallest: int, largest: int | None) -> int | None:
    """Return the value of a launcher's environment variable, None if it is not set."""
    try:
        return environment_integer(name, minimum=smallest, maximum=largest, fix="a launcher sets it")
    except ValueError as error:
        raise UserError(str(error)) from error
