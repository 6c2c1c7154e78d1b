"""Seeds and states of the generators that code uses when it has no generator of its own: torch's, random's, numpy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def seed_all(seed: int) -> None:
    """Seed the default generators of the CPU: torch's, random's and, where it is imported, numpy's.

    torch.manual_seed would format this thread's stack three times, for accelerators that an audit does not use.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def random_state() -> tuple[Any, ...]:
    """Return the states of the default generators; they differ if random numbers were drawn in between."""
    numpy = sys.modules.get("numpy")
    of_numpy = None
    if numpy is not None:
        _, words, *rest = numpy.random.get_state()
        of_numpy = (words.tobytes(), *rest)
    return bytes(torch.get_rng_state().tolist()), random.getstate(), of_numpy
