"""The number of ranks, from the configuration or from the environment variables of a launcher such as torchrun.

This module imports no torch.
"""

from __future__ import annotations

import os

from .._launcher import environment_integer
from .._user_error import UserError
from .config import TrainConfig

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def number_of_ranks(config: TrainConfig) -> int:
    """Return the number of ranks that the launcher has started, or else that of the configuration.

    Raises:
        UserError: if the two differ, or the batch has too few rows for so many ranks.
    """
    launched = launcher_size()
    if launched is not None and config.ranks not in (1, launched):
        raise UserError(f"--ranks must be left out under a launcher, which has started {launched}; got {config.ranks}")
    size = launched or config.ranks
    if config.batch_size < size:
        raise UserError(f"--batch-size must be at least the number of ranks, {size}; got {config.batch_size}")
    return size


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
        found = ", ".join(f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ)
        raise UserError(
            f"{found} means that a launcher has started several processes, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start with torchrun, which sets all of "
            f"{', '.join(_VARIABLES)}, or unset them"
        )
    _integer("LOCAL_RANK", 0, (_integer("LOCAL_WORLD_SIZE", 1, size) or 1) - 1)
    _integer("MASTER_PORT", 1, 65535)
    if not os.environ["MASTER_ADDR"].strip():
        raise UserError("MASTER_ADDR must be the address of the machine of rank 0, got ''")
    return size


def _integer(name: str, smallest: int, largest: int | None) -> int | None:
    """Return the value of a launcher's environment variable, None if it is not set."""
    try:
        return environment_integer(name, least=smallest, most=largest, fix="a launcher sets it")
    except ValueError as error:
        raise UserError(str(error)) from error
