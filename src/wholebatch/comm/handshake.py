"""The handshake: before any data is sent, all ranks agree or all ranks raise.

A rank that found a mistake in its arguments must not raise before a collective that the others enter: they would wait
for it until the timeout. So every call of a loss begins with one small all-gather in which each rank sends either its
facts (row counts, dtypes, options) or its error. If one rank sends an error, all ranks raise.

    first round     a record of 512 bytes from each rank: the digest of its statement's text, and its numbers
    second round    the texts, if any two of them differ, or if they are errors

See `records` for both. The facts of W ranks with one text are made from it and from their numbers when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from .._base.settings import check_callable, check_instance, check_sequence
from .._base.tensor_file import bytes_of
from .binding import CallError
from .compiled import eager
from .join_context import refuse_join_context
from .modules import calling, other_order
from .records import NUMBER, RECORD_BYTES, FactsByRank, Statement, Text, numbers_of_records, signed
from .transport import Checked, CommunicationError, Transport, named

GRAD_ENABLED, NEEDS_GRAD = "torch.is_grad_enabled()", "needs grad"  # facts about gradients
_ON_ALL_RANKS = "raised on all ranks"
_VERSION = b"wholebatch-version "  # of a message of 512 bytes, in this and all later versions
BACKWARD = "backward of "  # the beginning of the caller's name in a backward pass


@eager
def handshake(
    transport: Transport,
    state: Callable[[], Mapping[str, object]],
    *,
    caller: str,
    must_match: Sequence[str] = (),
    checked: Checked = True,
) -> FactsByRank:
    """Exchange every rank's facts: see `Communicator.handshake`.

    A number among the facts may be `OnDevice`. `checked` chooses the hint of the error if a rank does not come.
    """
    if transport.size > 1:
        refuse_join_context()
    passed, caller = caller, caller if isinstance(caller, str) else "handshake"
    cause: Exception | None = None
    try:
        check_instance("caller", passed, str, "a string, whose arguments these are")
        for name in check_sequence("must_match", must_match, "names of facts"):
            check_instance("must_match", name, str, "names of facts")
        facts = check_callable("state", state)()
        check_instance("the return value of state", facts, Mapping, "a mapping of JSON values")
        statement = Statement(caller, facts)
    except Exception as error:
        cause = error
        text = str(error) if isinstance(error, ValueError | CallError) else f"{type(error).__name__}: {error}"
        statement = Statement(caller, {}, [text, "call" if isinstance(error, CallError) else "value"])
    return exchange(transport, statement, must_match=must_match, checked=checked, cause=cause)


@eager
def exchange(
    transport: Transport,
    statement: Statement,
    *,
    must_match: Sequence[str] = (),
    checked: Checked = "of a loss",
    cause: Exception | None = None,
) -> FactsByRank:
    """Return the facts of all ranks, from this rank's statement, or raise on every rank.

    Collective: one all-gather of 512 bytes per rank (none at size 1), and a second one, of texts, if these differ.
    """
    by_rank = _gathered_facts(transport, statement, checked)
    mistake = (
        _complaints(by_rank.texts) or _other_callers(by_rank) or different_facts(statement.caller, by_rank, must_match)
    )
    if mistake is None and calling.get() and transport.size > 1 and not by_rank.unread():
        mistake = other_order(transport.kept, statement.caller, by_rank.modules)
    if mistake is not None:
        raise on_all_ranks(mistake, transport) from cause
    return by_rank


@eager
def exchange_unread(transport: Transport, statement: Statement, without: Tensor, numbers: Tensor) -> Tensor:
    """Return the records of all ranks, (W, n), which no host reads: this rank's is one `without` its first numbers."""
    record = without.clone()
    numbers_of_records(record, len(numbers)).copy_(numbers)
    return _gathered(transport, statement.signature, "of a loss", record)


def on_all_ranks(error: Exception, transport: Transport) -> Exception:
    """Return an error that all of these ranks raise, and note that."""
    error.__dict__[_ON_ALL_RANKS] = transport.kept
    return error


def raised_on_all_ranks(error: BaseException, transport: Transport) -> bool:
    """Return whether all of these ranks have raised this error, in a handshake of theirs."""
    return error.__dict__.get(_ON_ALL_RANKS) is transport.kept


def _complaints(texts: Sequence[Text]) -> Exception | None:
    """Return the error with all complaints, if there are any."""
    complaints = {rank: text.mistake for rank, text in enumerate(texts) if text.mistake is not None}
    if not complaints:
        return None
    # The same message on all ranks: it begins with the caller of a rank that made no mistake.
    who = next((text.caller for text in texts if text.mistake is None), texts[0].caller)
    messages = {
        rank: message if texts[rank].caller == who else f"{texts[rank].caller}: {message}"
        for rank, (message, _) in complaints.items()
    }
    kind = TypeError if all(kind == "call" for _, kind in complaints.values()) else ValueError
    return kind(f"{who}: {_by_rank(messages, len(texts))}")


def _other_callers(by_rank: FactsByRank) -> Exception | None:
    """Return the error that names the ranks' calls, if these differ."""
    callers = [text.caller for text in by_rank.texts]
    if len(set(callers)) == 1 and by_rank.differing(NUMBER) is None:
        return None
    calls = _by_rank(dict(enumerate(map(signed, callers, by_rank))), len(by_rank))
    return ValueError(f"all ranks must make the same calls in the same order, got {calls}{_hint(callers)}")


def different_facts(caller: str, agreed: FactsByRank, must_match: Sequence[str]) -> Exception | None:
    """Return the error about the first fact that differs between ranks, if one does: the same on all ranks."""
    for name in must_match:
        values = agreed.differing(name)
        if values is not None:
            if all(isinstance(value, dict) for value in values):
                values = [_differing(value, values) for value in values]
            by_rank = _by_rank(dict(enumerate(values)), len(agreed))
            return ValueError(f"{caller}: {name} must be the same on all ranks, got {by_rank}")
    return None


def _differing(items: Mapping[str, Any], rank_items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return those of a rank's items that are others on another rank."""
    return {key: x for key, x in items.items() if any(other.get(key) != x for other in rank_items)}


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


def _gathered_facts(transport: Transport, statement: Statement, checked: Checked) -> FactsByRank:
    """Return the facts of all ranks, from their records, and from a second round if their texts differ.

    All ranks have the same records, so all of them make a second round, or none.
    """
    who, rank, size = statement.signature, transport.rank, transport.size
    if size == 1:
        return FactsByRank(statement, statement.bytes_on_host())
    numbers = [fact.number for fact in statement.on_device]
    on_device = bool(numbers) and transport.stays_on_device(numbers[0])
    with torch.no_grad():
        if "version" not in transport.kept:
            _compare_versions(transport, who, checked)
        message = statement.record(numbers[0].device if on_device else None)
        gathered = _gathered(transport, who, checked, message)
        by_rank = FactsByRank(statement, gathered.cpu() if transport.stays_on_device(gathered) else gathered)
        for other in by_rank.foreign():
            raise _foreign(transport, who, other, f"{RECORD_BYTES} bytes that are no statement of a call")
        if by_rank.has_one_text:
            return by_rank
        if by_rank.unread():
            mistake = statement.mistake or ["make the same calls with the same options on all ranks"]
            raise ValueError(
                f"rank {rank} of {size}, in {who}: {mistake[0]} (rank {by_rank.unread()[0]} "
                "goes on with a loss of checks='deferred' as before, and waits; checks='entry' raises on all ranks)"
            )
        lengths = by_rank.lengths()
        text = torch.frombuffer(bytearray(statement.text.ljust(max(lengths))), dtype=torch.uint8).unsqueeze(0)
        texts = _gathered(transport, who, checked, text)
    for other in by_rank.read_texts([bytes(bytes_of(row)[:n]) for row, n in zip(texts, lengths, strict=True)]):
        raise _foreign(transport, who, other, "bytes that are not the text of its statement")
    return by_rank


def _compare_versions(transport: Transport, who: str, checked: Checked) -> None:
    """Raise ValueError on all ranks unless they run one version. Collective: an all-gather, once in a group."""
    message = torch.frombuffer(bytearray(b"%-512b" % (_VERSION + __version__.encode())), dtype=torch.uint8)[None]
    versions = [bytes(bytes_of(row)) for row in _gathered(transport, who, checked, message)]
    for rank, version in enumerate(versions):
        if not version.startswith(_VERSION):
            raise _foreign(transport, who, rank, "512 bytes that are no statement of a version")
    if len({*versions}) > 1:
        by_rank = {rank: version[len(_VERSION) :].decode().strip() for rank, version in enumerate(versions)}
        mistake = f"{who}: all ranks must run the same version of wholebatch, got {_by_rank(by_rank, transport.size)}"
        raise on_all_ranks(ValueError(f"{mistake}; install the same on all machines"), transport)
    transport.kept["version"] = __version__


def _gathered(transport: Transport, who: str, checked: Checked, x: Tensor) -> Tensor:
    def all_gather() -> Tensor:
        return transport.all_gather_statements(x)()

    return named(transport, who, checked, all_gather)


def _foreign(transport: Transport, who: str, rank: int, received: str) -> CommunicationError:
    return CommunicationError(
        f"rank {transport.rank} of {transport.size}, in {who}: rank {rank} sent {received}. It is probably in another "
        "collective of the same group: one that it makes more often than the others or in another order, or one "
        "of an engine. All ranks must make the same calls in the same order"
    )


def _by_rank(values: Mapping[int, Any], size: int) -> str:
    """Return `value` if all ranks have the same, else `rank 0: value; rank 3: value`."""
    first = next(iter(values.values()))
    if len(values) == size and all(value == first for value in values.values()):
        return str(first)
    return "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
