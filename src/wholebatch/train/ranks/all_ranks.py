"""A local action of every rank that succeeds on all ranks or fails on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import wholebatch as wb

from ..._base.user_error import UserError
from .waiting import WaitForFirstRank

_R = TypeVar("_R")


def on_all_ranks(
    caller: str,
    act: Callable[[], _R],
    facts: Callable[[_R], dict[str, Any]] = lambda _: {},
    *,
    patient: bool = False,
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
        except Exception:  # the handshake passes it on
            if wait is not None:
                wait()
            raise
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
