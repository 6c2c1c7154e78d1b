"""The state of the process that a user's code shares with the audit: default random generators, standard output."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
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
    numpy_state = None
    if numpy is not None:
        _, words, *rest = numpy.random.get_state()
        numpy_state = (words.tobytes(), *rest)
    return bytes(torch.get_rng_state().tolist()), random.getstate(), numpy_state


@contextlib.contextmanager
def suppress_output() -> Iterator[Callable[[], str]]:
    """Suppress standard output, of C libraries too; after the block, the yielded function returns the text."""
    with tempfile.TemporaryFile("w+") as file:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        texts: list[str] = []
        try:
            with contextlib.redirect_stdout(file):
                yield lambda: "".join(texts)
        finally:
            file.flush()
            os.dup2(stdout, 1)
            os.close(stdout)
            file.seek(0)
            texts.append(file.read())
