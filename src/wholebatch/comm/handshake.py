"""Before data moves, all ranks agree or all ranks raise.

A rank that found a mistake in its own arguments must not raise before a collective that the others enter: they
would wait for it until the timeout. So every call of a loss begins with one small all-gather in which each rank
states either its facts (row counts, dtypes, options) or its complaint. If anyone complains, everyone raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._settings import check_callable, check_instance, check_sequence, shown
from .binding import CallError, bound, complaint
from .compiled import eager
from .statement import NoStatementError, decode, encode
from .transport import Checked, CommunicationError, Transport, named

if TYPE_CHECKING:
    from .communicator import Communicator

GRAD_ENABLED, NEEDS_GRAD = "torch.is_grad_enabled()", "needs grad"  # facts about gradients
SIGNATURE = "signature"  # the fact that says what a rank passed, for the message when the callers differ
_MESSAGE_BYTES = 2048  # one rank's statement on the wire
_ON_ALL_RANKS = "raised on all ranks"
_CALLER, _FACTS, _COMPLAINT, _KIND, _LENGTH = "caller", "facts", "complaint", "kind of complaint", "length"
BACKWARD = "backward of "  # how the caller's name begins in a backward pass


def _refuse(error: CallError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise, on all ranks, an error about arguments that do not fit the handshake's own signature."""
    comm = kwargs.get("comm", args[0] if args else None)
    if isinstance(getattr(comm, "transport", comm), Transport):
        handshake(comm, complaint(error), caller="handshake")


@eager
@partial(bound, refuse=_refuse)
def handshake(
    comm: Communicator | Transport,
    state: Callable[[], Mapping[str, Any]],
    *,
    caller: str,
    must_match: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Exchange every rank's facts; raise on every rank if any rank's `state` raises or the facts clash.

    Collective: one all-gather of 2 KiB per rank (none at size 1), and a second of what does not fit.

    Args:
        comm: the ranks that take part.
        state: checks this rank's arguments and returns its facts as JSON values; whatever it raises becomes this
            rank's complaint.
        caller: whose arguments these are, for the message; the same on all ranks.
        must_match: names of facts that have to be equal on all ranks.

    Returns:
        The facts of rank 0, 1, ..., W - 1.

    Raises:
        ValueError: on every rank, with every complaint, or with each rank's value of the fact that differs.
        TypeError: the same, where all complaints are of arguments that do not fit a signature.
        CommunicationError: if a rank does not come, or sends something else.
    """
    checked: Checked = True
    if isinstance(comm, Transport):
        transport = comm
    elif isinstance(getattr(comm, "transport", None), Transport):
        transport, checked = comm.transport, "of a loss"
        comm.calls += 1
    else:
        raise ValueError(f"comm must be a communicator, got {shown(comm)}")
    given, caller = caller, caller if isinstance(caller, str) else "handshake"
    cause: Exception | None = None
    try:
        check_instance("caller", given, str, "a string, whose arguments these are")
        for name in check_sequence("must_match", must_match, "names of facts"):
            check_instance("must_match", name, str, "names of facts")
        facts = check_callable("state", state)()
        check_instance("what state returns", facts, Mapping, "a mapping of JSON values")
        mine: dict[str, Any] = {_CALLER: caller, _FACTS: {**facts}}
        json.dumps(mine)  # what cannot be told is a mistake, too: an array for a number
    except Exception as error:
        cause = error
        text = str(error) if isinstance(error, ValueError | CallError) else f"{type(error).__name__}: {error}"
        mine = {_CALLER: caller, _COMPLAINT: text, _KIND: "call" if isinstance(error, CallError) else "value"}
    everyone = [mine] if transport.size == 1 else _exchange(transport, mine, checked)

    complaints = {rank: facts[_COMPLAINT] for rank, facts in enumerate(everyone) if _COMPLAINT in facts}
    if complaints:
        kinds = {everyone[rank][_KIND] for rank in complaints}
        # The same words on all ranks: the call is named as by a rank that could make it.
        who = next((facts[_CALLER] for facts in everyone if _COMPLAINT not in facts), everyone[0][_CALLER])
        elsewhere = {rank: everyone[rank][_CALLER] for rank in complaints if everyone[rank][_CALLER] != who}
        told = {rank: f"{elsewhere[rank]}: {text}" if rank in elsewhere else text for rank, text in complaints.items()}
        text = f"{who}: {_by_rank(told, transport.size)}"
        raise _of_all(text, TypeError if kinds == {"call"} else ValueError) from cause
    callers = {rank: _who(facts) for rank, facts in enumerate(everyone)}
    if len({facts[_CALLER] for facts in everyone}) > 1:
        raise _of_all(
            f"all ranks must make the same calls in the same order, got {_by_rank(callers, transport.size)}"
            + _hint([facts[_CALLER] for facts in everyone])
        )
    for name in must_match:
        values = [facts[_FACTS].get(name) for facts in everyone]
        if not all(_same(value, values[0]) for value in values):
            by_rank = _by_rank(dict(enumerate(values)), transport.size)
            raise _of_all(f"{caller}: {name} must be the same on all ranks, got {by_rank}")
    return [facts[_FACTS] for facts in everyone]


def _of_all(message: str, kind: type[Exception] = ValueError) -> Exception:
    error = kind(message)
    error.__dict__[_ON_ALL_RANKS] = True
    return error


def _hint(callers: Sequence[str]) -> str:
    """Return the likely mistake, where one of the ranks is in a backward pass."""
    backward = [caller.startswith(BACKWARD) for caller in callers]
    if all(backward):
        return "; run the backward passes of several losses in the same order on all ranks, or add the losses up"
    if any(backward):
        return (
            "; a rank skips a backward pass, or makes a forward pass more. Decide on all ranks alike: a loss is the "
            "same number on all of them"
        )
    return ""


def raised_on_all_ranks(error: BaseException) -> bool:
    """Whether an error is a handshake's, so that the other ranks have it, too."""
    return _ON_ALL_RANKS in error.__dict__


def _same(a: object, b: object) -> bool:
    """Whether two facts are equal, NaN to NaN as well."""
    return a == b or json.dumps(a) == json.dumps(b)


def _who(facts: Mapping[str, Any]) -> str:
    signature = facts.get(_FACTS, {}).get(SIGNATURE)
    return facts[_CALLER] if signature is None else f"{facts[_CALLER]} of {signature}"


def _exchange(transport: Transport, mine: Mapping[str, Any], checked: Checked) -> list[dict[str, Any]]:
    """Every rank's facts: in one round, or in two if some rank has more to say than fits."""
    statement, who = encode(mine), _who(mine)
    fits = len(statement) <= _MESSAGE_BYTES
    first = statement if fits else encode({_LENGTH: len(statement)})
    everyone = _round(transport, who, first, _MESSAGE_BYTES, checked)
    longest = max(facts.get(_LENGTH, 0) for facts in everyone)
    return _round(transport, who, statement, longest, checked) if longest else everyone


def _round(transport: Transport, who: str, statement: bytes, num_bytes: int, checked: Checked) -> list[dict[str, Any]]:
    message = torch.frombuffer(bytearray(statement.ljust(num_bytes)), dtype=torch.uint8).unsqueeze(0)

    def all_gather() -> Tensor:
        return transport.all_gather_statements(message)()

    with torch.no_grad():
        messages = named(transport, who, checked, all_gather)
    return [_read(transport, who, rank, bytes(row)) for rank, row in enumerate(messages.tolist())]


def _read(transport: Transport, who: str, rank: int, message: bytes) -> dict[str, Any]:
    try:
        return decode(message)
    except NoStatementError as error:
        raise CommunicationError(
            f"rank {transport.rank} of {transport.size}, in {who}: rank {rank} sent {error}. It is probably in another "
            "collective of the same group: one that it makes more often than the others or in another order, or one "
            "of an engine. All ranks must make the same calls in the same order"
        ) from error


def _by_rank(values: Mapping[int, Any], size: int) -> str:
    """`value` if all ranks say the same, else `rank 0: value; rank 3: value`."""
    first = next(iter(values.values()))
    if len(values) == size and all(value == first for value in values.values()):
        return str(first)
    return "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
