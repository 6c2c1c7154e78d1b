"""The handshake: before any data is sent, all ranks agree or all ranks raise.

A rank that found a mistake in its arguments must not raise before a collective that the others enter: they would wait
for it until the timeout. So every call of a loss begins with one small all-gather in which each rank sends either its
facts (row counts, dtypes, options) or its error. If one rank sends an error, all ranks raise.

    first round     a record of 512 bytes from each rank: the digest of its statement's text, and its numbers
    second round    the texts, if any two of them differ, or if they are errors

See `records` for both. The facts of W ranks with one text are made from it and from their numbers when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from .._base.checks import on_host
from .._base.precision import wide_dtype
from .._base.settings import check_callable, check_instance, check_sequence
from .._base.tensor_file import bytes_of
from .binding import CallError
from .compiled import eager
from .facts_by_rank import Facts, FactsByRank
from .join_context import refuse_join_context
from .modules import calling, other_order
from .records import (
    FACTS,
    KINDS,
    RECORD_BYTES,
    OnDevice,
    Records,
    numbers_of_records,
    record,
    take_numbers,
    with_slots,
)
from .transport import Checked, CommunicationError, Transport, named

GRAD_ENABLED, NEEDS_GRAD = "torch.is_grad_enabled()", "needs grad"  # facts about gradients
DTYPE, SHAPE, NUMBER = "dtype", "shape", "number of the call"  # facts for the message when the callers differ
_ON_ALL_RANKS = "raised on all ranks"
_VERSION = b"wholebatch-version "  # of a message of 512 bytes, in this and all later versions
_CALLER, _COMPLAINT, _KIND = "caller", "complaint", "kind of complaint"
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
    """Exchange every rank's facts; raise on every rank if any rank's `state` raises or the facts clash.

    Collective: one all-gather of 512 bytes per rank (none at size 1), and a second one, of texts, if these differ.

    Args:
        transport: the ranks that take part.
        state: checks this rank's arguments and returns its facts as JSON values, or `OnDevice` for a number; an error
            that it raises becomes this rank's complaint.
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
    if transport.size > 1:
        refuse_join_context()
    passed, caller = caller, caller if isinstance(caller, str) else "handshake"
    cause: Exception | None = None
    facts: Any = {}
    try:
        check_instance("caller", passed, str, "a string, whose arguments these are")
        for name in check_sequence("must_match", must_match, "names of facts"):
            check_instance("must_match", name, str, "names of facts")
        facts = check_callable("state", state)()
        check_instance("the return value of state", facts, Mapping, "a mapping of JSON values")
        if transport.size == 1:
            json.dumps(facts, default=_refuse_non_json)  # a fact that is no JSON value is a mistake on one rank, too
            return FactsByRank([_read_back(facts)])
        local = _stated(caller, facts)
    except Exception as error:
        cause = error
        text = str(error) if isinstance(error, ValueError | CallError) else f"{type(error).__name__}: {error}"
        kind = "call" if isinstance(error, CallError) else "value"
        local = _Local(caller, {_CALLER: caller, _COMPLAINT: text, _KIND: kind})
    return _agreed(transport, local, caller, must_match, checked, cause)


def _agreed(
    transport: Transport,
    local: _Local,
    caller: str,
    must_match: Sequence[str],
    checked: Checked,
    cause: Exception | None = None,
) -> FactsByRank:
    """Exchange statements; return the facts of all ranks, or raise on every rank."""
    everyone, records = ([local.statement], None) if transport.size == 1 else _exchange(transport, local, checked)
    mistake = _complaints(everyone)
    if mistake is None:
        agreed = FactsByRank([of_rank[FACTS] for of_rank in everyone], records)
        mistake = _other_callers(everyone, agreed) or different_facts(caller, agreed, must_match)
        if mistake is None and records is not None and calling.get() and not records.unread():
            mistake = other_order(transport.kept, caller, records.modules)
    if mistake is not None:
        raise on_all_ranks(mistake, transport) from cause
    return agreed


class Statement:
    """A rank's valid statement, which a later call of the same form sends with other numbers.

    Args:
        caller: as for `handshake`.
        facts: of this rank; the first `varying` numbers on the host, and those on a device, change from call to call.
        varying: how many numbers on the host change.
    """

    def __init__(self, caller: str, facts: Mapping[str, object], varying: int) -> None:
        self._local, self._caller, self._varying = _stated(caller, facts), caller, varying

    @eager
    def exchange(self, transport: Transport, numbers: Sequence[float], on_device: Sequence[OnDevice]) -> FactsByRank:
        """Return the facts of all ranks, as `handshake` does, which the other ranks may call instead."""
        first = self._local
        local = _Local(first.who, first.statement, [*numbers, *first.numbers[self._varying :]], on_device, first.text)
        return _agreed(transport, local, self._caller, (), "of a loss")

    @eager
    def gather(self, transport: Transport, without: Tensor, numbers: Tensor) -> Tensor:
        """Return the records of all ranks, (W, n), which no host reads.

        Args:
            transport: the ranks.
            without: (1, n), the record of this rank without its first numbers.
            numbers: (k,), these.
        """
        local = without.clone()
        numbers_of_records(local, len(numbers)).copy_(numbers)
        return _gathered(transport, self._local.who, "of a loss", local)

    def forms_of_ranks(self, by_rank: FactsByRank) -> bytes | None:
        """Return all that the ranks have stated but for the numbers that change; None if their texts differ."""
        if by_rank.records is None:
            return b""
        return by_rank.records.without_numbers(len(self._local.on_device) + self._varying)


@dataclass
class _Local:
    """The statement of this rank, and the numbers that belong to it."""

    who: str
    statement: Facts
    numbers: Sequence[float] = ()
    on_device: Sequence[OnDevice] = ()
    text: bytes = b""

    def __post_init__(self) -> None:
        # which raises for a fact that is no JSON value, such as an array
        self.text = self.text or json.dumps(self.statement).encode()

    def record(self, transport: Transport) -> Tensor:
        """Return the record, on the device where the numbers are, if it travels from there."""
        tensors = [fact.number for fact in self.on_device]
        alone = transport.size == 1 and bool(tensors) and wide_dtype(tensors[0].device) == torch.float64
        if tensors and (alone or transport.stays_on_device(tensors[0])):
            return record(self.text, self.numbers, tensors, tensors[0].device)
        read = on_host(dict(enumerate(tensors)))
        return record(self.text, [*read.values(), *self.numbers], [], torch.device("cpu"))


def _read_back(facts: Mapping[str, Any]) -> Facts:
    """Return facts with all numbers, those on the device included, for which the host waits."""
    groups = {name: x for name, x in facts.items() if isinstance(x, Mapping)}
    numbers = {(name, key): x for name, group in groups.items() for key, x in group.items() if isinstance(x, OnDevice)}
    read = on_host({place: x.number for place, x in numbers.items()})
    filled = {**facts}
    for name in {name for name, _ in read}:
        filled[name] = {key: read.get((name, key), x) for key, x in groups[name].items()}
    return filled


def _refuse_non_json(value: object) -> None:
    if not isinstance(value, OnDevice):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _stated(caller: str, facts: Mapping[str, object]) -> _Local:
    without, kinds, numbers, on_device = take_numbers(facts)
    return _Local(_signed(caller, facts), {_CALLER: caller, FACTS: without, KINDS: kinds}, numbers, on_device)


def on_all_ranks(error: Exception, transport: Transport) -> Exception:
    """Return an error that all of these ranks raise, and note that."""
    error.__dict__[_ON_ALL_RANKS] = transport.kept
    return error


def raised_on_all_ranks(error: BaseException, transport: Transport) -> bool:
    """Return whether all of these ranks have raised this error, in a handshake of theirs."""
    return error.__dict__.get(_ON_ALL_RANKS) is transport.kept


def _complaints(everyone: Sequence[Facts]) -> Exception | None:
    """Return the error with all complaints, if there are any."""
    complaints = {rank: of_rank[_COMPLAINT] for rank, of_rank in enumerate(everyone) if _COMPLAINT in of_rank}
    if not complaints:
        return None
    # The same message on all ranks: it begins with the caller of a rank that made no mistake.
    who = next((of_rank[_CALLER] for of_rank in everyone if _COMPLAINT not in of_rank), everyone[0][_CALLER])
    elsewhere = {rank: everyone[rank][_CALLER] for rank in complaints if everyone[rank][_CALLER] != who}
    texts = {rank: f"{elsewhere[rank]}: {text}" if rank in elsewhere else text for rank, text in complaints.items()}
    return _kind([everyone[rank] for rank in complaints])(f"{who}: {_by_rank(texts, len(everyone))}")


def _kind(complaining: Sequence[Facts]) -> type[Exception]:
    return TypeError if all(of_rank[_KIND] == "call" for of_rank in complaining) else ValueError


def _other_callers(everyone: Sequence[Facts], agreed: FactsByRank) -> Exception | None:
    """Return the error that names the ranks' calls, if these differ."""
    callers = [of_rank[_CALLER] for of_rank in everyone]
    if len(set(callers)) == 1 and agreed.differing(NUMBER) is None:
        return None
    signed = dict(enumerate(map(_signed, callers, agreed)))
    return ValueError(
        f"all ranks must make the same calls in the same order, got {_by_rank(signed, len(everyone))}" + _hint(callers)
    )


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


def _differing(items: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return those of a rank's items that are others on another rank."""
    return {key: x for key, x in items.items() if any(other.get(key) != x for other in of_ranks)}


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


def _signed(caller: str, facts: Mapping[str, Any]) -> str:
    """Return a rank's caller, with the number of its call or the dtype and shape that it passed, if facts name them."""
    dtype, shape = facts.get(DTYPE), facts.get(SHAPE)
    if NUMBER in facts:
        return f"{caller} #{facts[NUMBER]}"
    if not isinstance(dtype, str) or not isinstance(shape, list):
        return caller
    return f"{caller} of {dtype.removeprefix('torch.')}({', '.join(map(str, shape))})"


def _exchange(transport: Transport, local: _Local, checked: Checked) -> tuple[list[Facts], Records]:
    """Return every rank's statement with slots for its numbers, and all records: after a second round if texts differ.

    All ranks have the same records, so all of them make a second round, or none.
    """
    with torch.no_grad():
        if "version" not in transport.kept:
            _compare_versions(transport, local.who, checked)
        message = local.record(transport)
        gathered = _gathered(transport, local.who, checked, message)
        records = Records(gathered.cpu() if transport.stays_on_device(gathered) else gathered)
        for rank in records.foreign():
            raise _foreign(transport, local.who, rank, f"{RECORD_BYTES} bytes that are no statement of a call")
        lengths = records.different_lengths()
        if lengths is not None and records.unread():
            mistake = local.statement.get(_COMPLAINT, "make the same calls with the same options on all ranks")
            raise ValueError(
                f"rank {transport.rank} of {transport.size}, in {local.who}: {mistake} (rank {records.unread()[0]} "
                "goes on with a loss of checks='deferred' as before, and waits; checks='entry' raises on all ranks)"
            )
        if lengths is None:
            return [_parsed(local.text)] * transport.size, records
        text = torch.frombuffer(bytearray(local.text.ljust(max(lengths))), dtype=torch.uint8).unsqueeze(0)
        texts = _gathered(transport, local.who, checked, text)
    everyone: list[Facts] = []
    for rank, row in enumerate(texts):
        their_text = bytes(bytes_of(row)[: lengths[rank]])
        if not records.announce(rank, their_text):
            raise _foreign(transport, local.who, rank, "bytes that are not the text of its statement")
        everyone.append(_parsed(their_text))
    return everyone, records


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


@lru_cache(maxsize=64)
def _parsed(text: bytes) -> Facts:
    """Return the statement of a text, with slots for its numbers: the text of a loss is the same in each step."""
    return with_slots(json.loads(text))


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
