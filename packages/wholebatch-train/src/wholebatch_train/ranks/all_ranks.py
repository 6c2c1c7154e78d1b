"""Actions that succeed on all ranks or fail on all, and long waits for the first rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.app import UserError

_R = TypeVar("_R")
LONGEST = timedelta(days=7)
"""More than a test, a report or a full file system takes, and in milliseconds less than 2^31."""


def on_all_ranks(
    caller: str, act: Callable[[], _R], facts: Callable[[_R], dict[str, Any]] = lambda _: {}, *, patient: bool = False
) -> tuple[_R, list[dict[str, Any]]]:
    """Return the local result of `act`, once it has succeeded on all ranks, and each rank's `facts` of its result.

    Collective: one handshake. With `patient`, `act` may take longer on one rank than the timeout of a collective, such
    as on the one machine whose cache is empty; before the handshake all ranks then wait for each other.

    Raises:
        UserError: on every rank, if `act` raises one on any.
    """
    results: list[_R] = []
    wait = WaitForFirstRank() if patient else None

    def state() -> dict[str, Any]:
        try:
            results.append(act())
        finally:  # the handshake passes an error on
            if wait is not None:
                wait()
        return facts(results[0])

    try:
        everyone = wb.comm.select_communicator(None).handshake(state, caller=caller)
    except ValueError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, UserError):
            raise  # an error of this program, with its traceback
        raise UserError(str(error).removeprefix(f"{caller}: ")) from error
    return results[0], [*everyone]


def from_first_rank(flag: bool, device: torch.device) -> bool:
    """Return rank 0's flag on every rank. Collective: one broadcast of an integer, none for one process."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor([flag], dtype=torch.int32, device=device)
    dist.broadcast(flags, 0)
    return bool(flags.item())


class WaitForFirstRank:
    """A barrier that has no timeout in practice, for work of rank 0 alone: a search, a checkpoint, the report.

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


def device_of(name: str, rank: int, ranks: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and count < ranks:
        raise UserError(f"--device cuda needs a GPU for each of the {ranks} ranks of this machine, found {count}")
    if name == "cpu" or count < ranks:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
