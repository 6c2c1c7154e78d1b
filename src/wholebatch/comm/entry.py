"""Enter a call: check this rank's arguments and, with checking, that all ranks make the same call.

A collective that joins or distributes rows also finds how many rows each rank sends and receives: if the caller gives
no counts, they are even, or a handshake finds them. The rest of a call follows in `communicator`; messages are entered
in `message_entry`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_choice, check_flag, check_instance, shown
from .arguments import OPS, check_tensor, checked_counts, checked_dim, checked_op, parts, without
from .binding import CallError, complaint
from .handshake import GRAD_ENABLED, NEEDS_GRAD, handshake
from .maps import LOSSES, Loss
from .order import Call, Order
from .records import DTYPE, SHAPE, Facts
from .transport import Checked, Transport

Counts = Sequence[int] | None
_Fixed = tuple[int, ...]  # counts, one for each rank

# A call begins with a handshake if `check=True` or the communicator asks for it, and in any case if it needs the other
# ranks' facts: these methods always do, those below where the caller leaves out one of the named counts.
_ALWAYS = ("handshake", "split")
_FINDS_OUT = {
    **dict.fromkeys(("all_gather", "iall_gather", "gather", "scatter"), ("counts",)),
    "all_to_all": ("send_counts", "receive_counts"),
}


class CallEntry:
    """The ranks, the settings of their calls, and the account of the calls so far."""

    def __init__(self, transport: Transport, loss: Loss, check: bool | None, trace: bool | None) -> None:
        check_instance("transport", transport, Transport, "a Transport; use one of the subclasses of Communicator")
        check_choice("loss", loss, LOSSES)
        self.transport = transport
        self.rank = transport.rank
        """Index of this process in the communicator, 0 <= rank < size."""
        self.size = transport.size
        """Number of ranks, W."""
        self.loss: Loss = loss
        self.check = _switch("WHOLEBATCH_CHECK", check, default=True)
        self.trace = _switch("WHOLEBATCH_TRACE", trace, default=False)
        self._order = Order()
        self._calls = 0  # collectives so far, the same on all ranks
        self._messages = 0  # ends of messages so far
        self._slots: dict[tuple[str, int, int], int] = {}  # messages so far, by direction, peer and tag
        self._dropped: list[str] = []  # operations whose handles were dropped, to be reported

    def _enter(
        self,
        operation: str,
        x: Tensor | None,
        options: Callable[[], Mapping[str, Any]],
        check: bool | None,
        must_match: Sequence[str] = ("dtype", "shape", "op", "root"),
        *,
        finds_out: bool = False,
        optional: bool = False,
    ) -> tuple[Call, Sequence[Facts] | None]:
        """Enter a collective; return the call, and the facts of all ranks if there was a handshake.

        `options` checks the arguments beside x, and returns the facts about them; those of `must_match` have to be
        equal on all ranks. A call that `finds_out` counts begins with a handshake. x is None only where `optional`.
        """
        self.transport.check_open()
        self._calls += 1
        name = f"{operation} #{self._calls}"
        checking = finds_out or self._checks(check)

        def state() -> Facts:
            self._refuse_dropped_handles()
            if check is not None:
                check_flag("check", check)
            if x is not None or not optional:
                check_tensor("x", x)
            facts: Facts = {GRAD_ENABLED: torch.is_grad_enabled(), NEEDS_GRAD: x is not None and x.requires_grad}
            if x is not None:
                self.transport.use_device(x.device)
                facts |= {DTYPE: str(x.dtype), SHAPE: list(x.shape)}
            return {**facts, **options()}

        everyone = None
        if checking:
            everyone = handshake(self.transport, state, caller=name, must_match=(*must_match, GRAD_ENABLED))
        else:
            state()
        joins = everyone is None or any(facts[NEEDS_GRAD] for facts in everyone)
        checked: Checked = "before" if check is False else checking
        call = Call(self.transport, name, check=checked, trace=self.trace, joins=joins)
        return self._order.enter(call), everyone

    def _enter_rows(
        self, operation: str, x: Tensor, counts: Counts, dim: int, check: bool | None, **options: Any
    ) -> tuple[Call, _Fixed]:
        """Enter a collective to which each rank passes its rows; return how many each of them passes."""

        def state() -> Facts:
            for name, value in options.items():
                self._checked_rank(name, value)
            rows = checked_dim(x, dim)
            if counts is not None:
                checked_counts(counts, self.size, x.shape[rows], x, rank=self.rank)
            listed = None if counts is None else list(counts)
            return {
                **options,
                "dim": rows,
                "rows": x.shape[rows],
                "trailing shape": without(x.shape, rows),
                "counts": listed,
            }

        names = ("dtype", "dim", "trailing shape", "counts", *options)
        call, everyone = self._enter(operation, x, state, check, names, finds_out=counts is None)
        if counts is None:
            assert everyone is not None
            counts = [facts["rows"] for facts in everyone]
        return call, tuple(counts)

    def _enter_parts(
        self,
        operation: str,
        x: Tensor,
        op: str,
        counts: Counts,
        dim: int,
        check: bool | None,
        ops: tuple[str, ...] = OPS,
    ) -> tuple[Call, _Fixed]:
        """Enter a collective that distributes the sum of the ranks' tensors; return how much each rank receives."""
        asked: Sequence[int] = ()

        def state() -> Facts:
            nonlocal asked
            rows = checked_dim(x, dim)
            asked = parts(counts, self.size, x, rows)
            return {"op": checked_op(op, x, ops), "counts": list(asked), "dim": rows}

        call, _ = self._enter(operation, x, state, check, ("dtype", "shape", "op", "counts", "dim"))
        return call, tuple(asked)

    def _enter_scatter(
        self, x: Tensor | None, root: int, counts: Counts, dim: int, check: bool | None
    ) -> tuple[Call, Tensor, _Fixed]:
        """Enter a scatter; return this rank's tensor, one without rows where it passed none, and the root's counts."""
        finds_out = counts is None

        def state() -> Facts:
            self._checked_rank("root", root)
            if x is None and not (finds_out or self._checks(check)):
                raise ValueError("without checking, every rank passes a tensor: here for example like.new_empty(0, d)")
            if x is None:
                if self.rank == root:
                    raise ValueError("rank `root` must pass the tensor to scatter, got None")
                return {"root": root}
            rows = checked_dim(x, dim)
            asked = {"counts": list(parts(counts, self.size, x, rows))} if self.rank == root else {}
            return {"root": root, "other dimensions": without(x.shape, rows), "dim": rows, **asked}

        call, everyone = self._enter("scatter", x, state, check, ("root",), finds_out=finds_out, optional=True)
        if everyone is not None:
            root_facts = _facts_of_root(everyone, root)
            counts = root_facts["counts"]
            if x is None:
                shape = [*root_facts["other dimensions"]]
                shape.insert(root_facts["dim"], 0)
                x = torch.empty(shape, dtype=getattr(torch, root_facts["dtype"].removeprefix("torch.")))
        assert x is not None
        assert counts is not None
        return call, x, tuple(counts)

    def _enter_all_to_all(
        self, x: Tensor, send_counts: Counts, receive_counts: Counts, dim: int, check: bool | None
    ) -> tuple[Call, _Fixed, _Fixed]:
        """Enter an all_to_all; return how much this rank sends to each rank, and receives from it."""

        def state() -> Facts:
            rows = checked_dim(x, dim)
            asked = parts(send_counts, self.size, x, rows, "send_counts")
            if receive_counts is not None:
                checked_counts(receive_counts, self.size, None, x, "receive_counts")
            return {
                "dim": rows,
                "other dimensions": without(x.shape, rows),
                "sends": list(asked),
                "expects": None if receive_counts is None else list(receive_counts),
            }

        finds_out, names = send_counts is None or receive_counts is None, ("dtype", "dim", "other dimensions")
        call, everyone = self._enter("all_to_all", x, state, check, names, finds_out=finds_out)
        if everyone is not None:
            _check_both_ends(everyone)
            send_counts = everyone[self.rank]["sends"]
            receive_counts = [facts["sends"][self.rank] for facts in everyone]
        assert send_counts is not None
        assert receive_counts is not None
        return call, tuple(send_counts), tuple(receive_counts)

    def _refuse_call(self, method: str, error: CallError, passed: Mapping[str, Any]) -> None:
        """Raise an error about arguments that do not fit a collective method, on all ranks where they check calls."""
        self.transport.check_open()
        takes = inspect.signature(getattr(type(self), method)).parameters
        finds_out = method in _ALWAYS or any(passed.get(name) is None for name in _FINDS_OUT.get(method, ()))
        shakes_hands = finds_out or self._checks(passed.get("check") if "check" in takes else None)
        self._calls += shakes_hands or method != "backward"  # as the ranks that made no mistake count it
        if shakes_hands:
            caller = f"{type(self).__name__}.{method}"
            handshake(self.transport, complaint(error), caller=caller, checked="of a loss")

    def _checks(self, check: object) -> bool:
        """Return whether the ranks compare a call with this `check`; one that is no bool is refused there."""
        return check if isinstance(check, bool) else self.check

    def _checked_rank(self, name: str, rank: int) -> int:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.size:
            raise ValueError(f"{name} must be a rank of this communicator, 0 to {self.size - 1}; got {shown(rank)}")
        return rank

    def _refuse_dropped_handles(self) -> None:
        """Report once the operations that will never end."""
        if self._dropped:
            names, self._dropped = ", ".join(self._dropped), []
            raise ValueError(f"handles were dropped without wait(): {names}; keep each handle and wait for it once")


def _facts_of_root(everyone: Sequence[Facts], root: int) -> Facts:
    """Return the root's facts, which those of the other ranks must not contradict."""
    truth = everyone[root]
    for rank, facts in enumerate(everyone):
        for name in ("dtype", "dim", "other dimensions"):
            if name in facts and facts[name] != truth[name]:
                raise ValueError(
                    f"scatter: {name} must be those of the root, rank {root}: {truth[name]}; rank {rank}: {facts[name]}"
                )
    return truth


def _check_both_ends(everyone: Sequence[Facts]) -> None:
    """Raise ValueError if a rank expects other counts than the ranks send it."""
    for rank, facts in enumerate(everyone):
        comes = [other["sends"][rank] for other in everyone]
        if facts["expects"] is not None and facts["expects"] != comes:
            raise ValueError(
                f"all_to_all: rank {rank} has receive_counts {facts['expects']}, but the ranks send it {comes}"
            )


def _switch(variable: str, asked: bool | None, *, default: bool) -> bool:
    """Return the setting that the caller asked for, or that of the environment variable."""
    if asked is not None:
        return check_flag(variable.rpartition("_")[2].lower(), asked)
    value = os.environ.get(variable, str(int(default)))
    if value not in ("0", "1"):
        raise ValueError(f"the environment variable {variable} must be 0 or 1, got {value!r}")
    return value == "1"
