"""The door that all losses share: every rank's arguments are sound and agree, or every rank raises.

It also sees to it that all ranks enter the backward pass together. A rank whose own inputs need no gradient (a frozen
tower, a rank without rows) would build no graph, never call the collectives of the backward pass, and leave the others
waiting. So inputs that need a gradient on any rank need one on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from .._checks import check_alike, check_choice, check_features, check_memory, check_scalar, largest_norm
from .._precision import accumulation_dtype
from ..comm import Communicator, Group, handshake, select_communicator
from ..comm.handshake import GRAD_ENABLED
from ..exchange import EXCHANGES, Exchange, ExchangeName, num_entries, select_exchange
from ..partition import Partition
from ..sweep import Budget, Memory, default_side, fit, smallest_budget
from ..sync import Sync, check_sync
from ._joining import gradient_facts, join

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ARGUMENTS = "the arguments that are given (a rank without rows passes shape (0, d), not None)"
_TOLERANCE = 1e-5  # of a scalar between ranks, relative: parameters that engines keep equal differ by rounding at most


@dataclass(frozen=True)
class Options:
    """What every loss lets its caller choose."""

    group: Group
    sync: Sync
    exchange: ExchangeName
    memory: Memory

    def check(self) -> None:
        """Raise ValueError unless each of them exists; `group` is looked at when the loss is called."""
        check_sync(self.sync)
        check_choice("exchange", self.exchange, EXCHANGES)
        check_memory(self.memory)


class LossModule(nn.Module):
    """A module that holds a loss's settings, checked when it is made; its `forward` calls the function."""

    def __init__(self, group: Group, sync: Sync, exchange: ExchangeName, memory: Memory) -> None:
        super().__init__()
        Options(group, sync, exchange, memory).check()
        self.group, self.sync, self.exchange, self.memory = group, sync, exchange, memory

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in ("sync", "exchange", "memory"))


@dataclass(frozen=True)
class Agreement:
    """What each rank knows of all ranks' arguments."""

    caller: str
    options: Options
    comm: Communicator
    scalars: dict[str, float]
    rows: dict[str, Partition]  # of each matrix of features
    norms: dict[str, float]  # the largest of all rows of all ranks
    inputs: list[Any]  # scalars, then features; those that need a gradient on any rank need one here
    memory_by_rank: list[Memory]
    width: int
    dtype: torch.dtype  # in which sums are taken
    device: torch.device

    @property
    def differentiable(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in self.inputs)

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.comm.rank

    def exchange(self, stays: Partition, travels: Partition, *, symmetric: bool = False) -> tuple[Exchange, Budget]:
        """The exchange that was asked for, and what this rank's sweep may allocate.

        Raises:
            ValueError: on every rank, if a rank's `memory` is too little for its part.
        """
        side = default_side(self.device)
        for rank, memory in enumerate(self.memory_by_rank):
            needed = smallest_budget(stays.counts[rank], travels.total, self.dtype)
            if isinstance(memory, int) and memory < needed:
                raise ValueError(
                    f"{self.caller}: memory must be at least {needed} bytes for the smallest tiles of rank {rank}, got "
                    f"{memory}; 'flat' takes what it needs, at most {2 * side * side * self.dtype.itemsize} bytes"
                )
        exchange = select_exchange(
            self.options.exchange,
            self.comm,
            stays.counts[self.rank],
            travels,
            row_bytes=self.width * self.dtype.itemsize,
            symmetric=symmetric,
        )
        entries = num_entries(exchange.visits, side)
        return exchange, fit(self.options.memory, entries=entries, side=side, dtype=self.dtype)


def eager(loss: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: a compiled training step leaves its graph for the loss, whose handshake no graph can hold."""
    return torch.compiler.disable(loss, reason="wholebatch's losses run outside the compiled graph")


def agree(
    caller: str,
    options: Options,
    *,
    scalars: Mapping[str, Tensor | float | None],
    features: Mapping[str, Tensor | None],
    paired: tuple[str, str] | None = None,
    optional: Sequence[str] = (),
    check: Callable[[], Mapping[str, Any]] = dict,
    must_match: Sequence[str] = (),
) -> Agreement:
    """Make sure that every rank's arguments are sound and that they agree. Collective: one handshake.

    Args:
        caller: the loss, for messages.
        options: of the caller's.
        scalars: numbers that are the same on all ranks.
        features: matrices of the same width, dtype and device, the first of which has the batch's rows.
        paired: names of two of them that have the same rows.
        optional: names of scalars and features that may be None.
        check: looks at what else there is, and returns facts about it.
        must_match: names of such facts that have to be the same on all ranks.

    Raises:
        ValueError: on every rank, whichever rank made the mistake.
    """
    comm = select_communicator(options.group)
    inputs = [*scalars.values(), *features.values()]
    given: dict[str, Any] = {name: x for name, x in features.items() if x is not None or name not in optional}
    numbers = {name: x for name, x in scalars.items() if x is not None or name not in optional}

    def state() -> dict[str, Any]:
        options.check()
        if options.exchange == "ring" and not comm.transport.tells_tags_apart:
            raise ValueError(
                "exchange='ring' needs messages that are told apart by their tags, which NCCL does not do; use "
                "'gather', or a group on gloo or MPI"
            )
        for name, x in given.items():
            check_features(name, x)
        first_name, first = next(iter(given.items()))
        for name, x in given.items():
            check_alike(first_name, first, name, x, rows=(first_name, name) == paired)
        norms = {name: largest_norm(name, x) for name, x in given.items()}
        return {
            _ARGUMENTS: [*numbers, *given],
            "rows": {name: len(x) for name, x in given.items()},
            "norms": norms,
            "feature size": first.shape[1],
            "dtype": str(first.dtype),
            "device type": first.device.type,
            "scalars": {name: check_scalar(name, value) for name, value in numbers.items()},
            "sync": options.sync,
            "exchange": options.exchange,
            "memory": options.memory,
            **check(),
            **gradient_facts(inputs),
        }

    names = (_ARGUMENTS, "feature size", "dtype", "device type", "sync", "exchange", *must_match, GRAD_ENABLED)
    everyone = handshake(comm, state, caller=caller, must_match=names)
    rows = {name: Partition(tuple(facts["rows"][name] for facts in everyone)) for name in given}
    first_name, first = next(iter(given.items()))
    if rows[first_name].total == 0:
        raise ValueError(f"{caller}: the global batch is empty, every rank passed 0 rows")
    by_rank = {name: [facts["scalars"][name] for facts in everyone] for name in numbers}
    for name, values in by_rank.items():
        _check_equal(caller, name, values)
    return Agreement(
        caller,
        options,
        comm,
        {name: values[0] for name, values in by_rank.items()},
        rows,
        {name: max(facts["norms"][name] for facts in everyone) for name in given},
        join(inputs, everyone),
        [facts["memory"] for facts in everyone],
        first.shape[1],
        accumulation_dtype(first.dtype),
        first.device,
    )


def _check_equal(caller: str, name: str, values: Sequence[float]) -> None:
    if max(values) - min(values) > _TOLERANCE * abs(values[0]):
        raise ValueError(
            f"{caller}: {name} must be the same on all ranks, got {values}; give all ranks the same initial "
            "parameters, and let the engine average its gradient like any other's"
        )
