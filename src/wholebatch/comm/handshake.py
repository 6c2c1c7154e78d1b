"""The handshake: before any data is sent, all ranks agree or all ranks raise.

A rank that found a mistake in its arguments must not raise before a collective that the others enter: they would wait
for it until the timeout. So every call of a loss begins with one small all-gather in which each rank sends either its
facts (row counts, dtypes, options) or its error. If one rank sends an error, all ranks raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._settings import check_callable, check_instance, check_sequence
from .binding import CallError
from .compiled import eager
from .statement import NoStatementError, decode, encode
from .transport import Checked, CommunicationError, Transport, named

Facts = dict[str, Any]  # JSON values by name

GRAD_ENABLED, NEEDS_GRAD = "torch.is_grad_enabled()", "needs grad"  # facts about gradients
SIGNATURE = "signature"  # the fact that names a rank's dtype and shape, for the message when the callers differ
_MESSAGE_BYTES = 2048  # one rank's statement on the wire
_ON_ALL_RANKS = "raised on all ranks"
_CALLER, _FACTS, _COMPLAINT, _KIND, _LENGTH = "caller", "facts", "complaint", "kind of complaint", "length"
BACKWARD = "backward of "  # the beginning of the caller's name in a backward pass


@eager
def handshake(
    transport: Transport,
    state: Callable[[], Mapping[str, object]],
    *,
    caller: str,
    must_match: Sequence[str] = (),
    checked: Checked = True,
) -> list[Facts]:
    """Exchange every rank's facts; raise on every rank if any rank's `state` raises or the facts clash.

    Collective: one all-gather of 2 KiB per rank (none at size 1), and a second one for a longer statement.

    Args:
        transport: the ranks that take part.
        state: checks this rank's arguments and returns its facts as JSON values; an error that it raises becomes this
            rank's complaint.
        caller: the function whose arguments these are, for the message; the same on all ranks.
        must_match: names of facts that have to be equal on all ranks.
        checked: chooses the hint of the error if a rank does not come.

    Returns:
        The facts of rank 0, 1, ..., W - 1.

    Raises:
        ValueError: on every rank, with every complaint, or with each rank's value of the fact that differs.
        TypeError: the same, where all complaints are about arguments that do not fit a signature.
        CommunicationError: if a rank does not come, or sends something else.
    """
    given, caller = caller, caller if isinstance(caller, str) else "handshake"
    cause: Exception | None = None
    try:
        check_instance("caller", given, str, "a string, whose arguments these are")
        for name in check_sequence("must_match", must_match, "names of facts"):
            check_instance("must_match", name, str, "names of facts")
        facts = check_callable("state", state)()
        check_instance("the return value of state", facts, Mapping, "a mapping of JSON values")
        local: Facts = {_CALLER: caller, _FACTS: {**facts}}
        json.dumps(local)  # a fact that is no JSON value, such as an array for a number, is a mistake too
    except Exception as error:
        cause = error
        text = str(error) if isinstance(error, ValueError | CallError) else f"{type(error).__name__}: {error}"
        local = {_CALLER: caller, _COMPLAINT: text, _KIND: "call" if isinstance(error, CallError) else "value"}
    everyone = [local] if transport.size == 1 else _exchange(transport, local, checked)
    mistake = _complaints(everyone) or _other_callers(everyone) or _other_facts(everyone, must_match)
    if mistake is not None:
        raise mistake from cause
    return [of_rank[_FACTS] for of_rank in everyone]


def raised_on_all_ranks(error: BaseException) -> bool:
    """Return whether a handshake raised this error, so that the other ranks have it too."""
    return _ON_ALL_RANKS in error.__dict__


def _of_all(message: str, kind: type[Exception] = ValueError) -> Exception:
    """Return the error that all ranks raise."""
    error = kind(message)
    error.__dict__[_ON_ALL_RANKS] = True
    return error


def _complaints(everyone: Sequence[Facts]) -> Exception | None:
    """Return the error with all complaints, if there are any."""
    complaints = {rank: of_rank[_COMPLAINT] for rank, of_rank in enumerate(everyone) if _COMPLAINT in of_rank}
    if not complaints:
        return None
    kinds = {everyone[rank][_KIND] for rank in complaints}
    # The same message on all ranks: it begins with the caller of a rank that made no mistake.
    who = next((of_rank[_CALLER] for of_rank in everyone if _COMPLAINT not in of_rank), everyone[0][_CALLER])
    elsewhere = {rank: everyone[rank][_CALLER] for rank in complaints if everyone[rank][_CALLER] != who}
    texts = {rank: f"{elsewhere[rank]}: {text}" if rank in elsewhere else text for rank, text in complaints.items()}
    return _of_all(f"{who}: {_by_rank(texts, len(everyone))}", TypeError if kinds == {"call"} else ValueError)


def _other_callers(everyone: Sequence[Facts]) -> Exception | None:
    """Return the error that names the ranks' calls, if these differ."""
    callers = [of_rank[_CALLER] for of_rank in everyone]
    if len(set(callers)) == 1:
        return None
    signed = {rank: _signed(of_rank) for rank, of_rank in enumerate(everyone)}
    return _of_all(
        f"all ranks must make the same calls in the same order, got {_by_rank(signed, len(everyone))}" + _hint(callers)
    )


def _other_facts(everyone: Sequence[Facts], must_match: Sequence[str]) -> Exception | None:
    """Return the error about the first fact that differs between ranks, if one does."""
    for name in must_match:
        values = [of_rank[_FACTS].get(name) for of_rank in everyone]
        if not all(_same(value, values[0]) for value in values):
            by_rank = _by_rank(dict(enumerate(values)), len(everyone))
            return _of_all(f"{everyone[0][_CALLER]}: {name} must be the same on all ranks, got {by_rank}")
    return None


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


def _same(a: object, b: object) -> bool:
    """Return whether two facts are equal; NaN equals NaN."""
    return a == b or json.dumps(a) == json.dumps(b)


def _signed(of_rank: Facts) -> str:
    """Return a rank's caller, with the dtype and shape that it passed where the facts name them."""
    signature = of_rank.get(_FACTS, {}).get(SIGNATURE)
    return of_rank[_CALLER] if signature is None else f"{of_rank[_CALLER]} of {signature}"


def _exchange(transport: Transport, local: Facts, checked: Checked) -> list[Facts]:
    """Return every rank's statement: after one round, or two if a statement is longer than one round carries."""
    statement, who = encode(local), _signed(local)
    fits = len(statement) <= _MESSAGE_BYTES
    first = statement if fits else encode({_LENGTH: len(statement)})
    everyone = _round(transport, who, first, _MESSAGE_BYTES, checked)
    longest = max(of_rank.get(_LENGTH, 0) for of_rank in everyone)
    return _round(transport, who, statement, longest, checked) if longest else everyone


def _round(transport: Transport, who: str, statement: bytes, num_bytes: int, checked: Checked) -> list[Facts]:
    message = torch.frombuffer(bytearray(statement.ljust(num_bytes)), dtype=torch.uint8).unsqueeze(0)

    def all_gather() -> Tensor:
        return transport.all_gather_statements(message)()

    with torch.no_grad():
        messages = named(transport, who, checked, all_gather)
    return [_read(transport, who, rank, bytes(row)) for rank, row in enumerate(messages.tolist())]


def _read(transport: Transport, who: str, rank: int, message: bytes) -> Facts:
    try:
        return decode(message)
    except NoStatementError as error:
        raise CommunicationError(
            f"rank {transport.rank} of {transport.size}, in {who}: rank {rank} sent {error}. It is probably in another "
            "collective of the same group: one that it makes more often than the others or in another order, or one "
            "of an engine. All ranks must make the same calls in the same order"
        ) from error


def _by_rank(values: Mapping[int, Any], size: int) -> str:
    """Return `value` if all ranks have the same, else `rank 0: value; rank 3: value`."""
    first = next(iter(values.values()))
    if len(values) == size and all(value == first for value in values.values()):
        return str(first)
    return "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
