"""The number of ranks, from the configuration or from the environment variables of a launcher such as torchrun.

This module imports no torch.
"""

from __future__ import annotations

from ..._base.user_error import UserError
from ..._launch.launcher import launcher_size
from ..config import TrainConfig


def number_of_ranks(config: TrainConfig) -> int:
    """Return the number of ranks that the launcher has started, or else that of the configuration.

    Raises:
        UserError: if the two differ, or the batch has too few rows for so many ranks.
    """
    launched = launcher_size()
    if launched is not None and config.ranks not in (1, launched):
        raise UserError(f"--ranks must be left out under a launcher, which has started {launched}; got {config.ranks}")
    size = launched or config.ranks
    if 0 < config.batch_size < size:
        raise UserError(f"--batch-size must be at least the number of ranks, {size}; got {config.batch_size}")
    return size
