"""Waiting for the first rank while it works alone: at the figures of a search, checkpoints, pictures and the report.

At the start all wait so for the slowest rank.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

LONGEST = timedelta(days=7)
"""More than a test, a report or a full file system takes, and in milliseconds less than 2^31."""


class WaitForFirstRank:
    """A barrier that has no timeout in practice.

    Other collectives have torch.distributed's timeout, 10 minutes with NCCL and 30 with gloo, which finds ranks that
    hang in a step. A rank that waited in one of them for work of rank 0 alone would be ended by it, so all ranks meet
    here first. A rank that ends closes its connections, and the others get an error at once: no end is waited for.

    Collective: creates a process group of gloo.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=LONGEST) if dist.is_initialized() else None

    def __call__(self) -> None:
        """Wait until all ranks are here. All ranks."""
        if self._group is not None:
            dist.barrier(self._group)
