"""If one rank raises in a step, all ranks raise; otherwise all go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..comm import Communicator
from ..comm.handshake import raised_on_all_ranks

_T = TypeVar("_T")


def agree(comm: Communicator, state: Callable[[], Any], *, caller: str = "GradCache") -> list[Any]:
    """Return each rank's state(), a JSON value; if it raises on one rank, raise on all.

    That rank raises its error, the others a ValueError with its text.
    """
    if comm.size == 1:
        return [state()]
    local: list[Exception] = []

    def facts() -> dict[str, Any]:
        try:
            return {"found": state()}
        except Exception as error:
            local.append(error)
            raise

    try:
        return [of_rank["found"] for of_rank in comm.handshake(facts, caller=caller)]
    except ValueError:
        if local and not isinstance(local[0], ValueError):
            raise local[0] from None
        raise


def agree_after(
    comm: Communicator, compute: Callable[[], _T], state: Callable[[], Any], *, caller: str = "GradCache"
) -> tuple[_T, list[Any]]:
    """Return compute(), which may communicate, and each rank's state() after it; if one raises on a rank, all raise."""
    result, failed = list[_T](), None
    try:
        result.append(compute())
    except Exception as error:
        if comm.size == 1 or raised_on_all_ranks(error, comm.transport):
            raise
        failed = error

    def facts() -> Any:
        if failed is not None:
            raise failed
        return state()

    everyone = agree(comm, facts, caller=caller)
    return result[0], everyone


def end_together(comm: Communicator, error: Exception | None, *, caller: str = "GradCache") -> None:
    """Return if no rank has an error; else raise on all."""

    def state() -> None:
        if error is not None:
            raise error

    agree(comm, state, caller=caller)
