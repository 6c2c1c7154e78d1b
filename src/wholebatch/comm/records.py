"""The statements of a handshake: each is a text, and a record with the text's digest and the numbers of the facts.

    text      {"caller": "clip_loss", "facts": {"rows": null, "dtype": "torch.float32"}, "numbers": "i-"}
    record    start | digest of the text (2) | its length | module | numbers (up to 58) | end      64 words of 64 bits

The text has null instead of each number; its "numbers" say which values of the facts these are, in order: i, f and
b (int, float, bool), d (on a device), - for a value that stays in the text. In most calls all ranks have one text. Then
the records say everything, and no rank reads any text. A number on a device goes into the record there: the host waits
once, when it reads all records.

A rank that finds other bytes instead of a record has met another rank in the middle of another operation: the
first and the last word show it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from .._base.checks import on_host
from .._base.tensor_file import bytes_of
from .modules import calling

DTYPE, SHAPE, NUMBER = "dtype", "shape", "number of the call"  # facts for the message when the callers differ
CALLER, FACTS, KINDS, MISTAKE = "caller", "facts", "numbers", "mistake"  # the fields of a text
WORDS = 64
RECORD_BYTES = 8 * WORDS
_MODULE, _FIRST = 4, 5  # the word with the number of the module, and the words before the numbers
_MOST = WORDS - _FIRST - 1  # numbers of a record
_START, _UNREAD, _END = struct.unpack("=3q", b"wholebat" + b"wb-other" + b"ch-rec-3")
_EXACT = 2**53  # integers up to here are exact in float64
_KINDS = {bool: "b", int: "i", float: "f"}
_TYPES: dict[str, Callable[[float], Any]] = {"b": bool, "i": int, "f": float, "d": float}


@dataclass(frozen=True)
class OnDevice:
    """A number that is still on its device, instead of a fact: a tensor of one element."""

    number: Tensor


class Statement:
    """A rank's facts about a call, or its mistake: a text, and the numbers that the text leaves out.

    Args:
        caller: the function whose arguments these are.
        facts: of this rank, JSON values or `OnDevice`; {} with a mistake.
        mistake: the message and the kind of this rank's error.

    Raises:
        TypeError: for a fact that is no JSON value, such as an array.
    """

    def __init__(self, caller: str, facts: Mapping[str, object], mistake: Sequence[str] | None = None) -> None:
        self.caller, self.signature, self.mistake = caller, signed(caller, facts), mistake
        without, kinds, self.numbers, self.on_device = take_numbers(facts)
        text = {CALLER: caller, MISTAKE: mistake} if mistake else {CALLER: caller, FACTS: without, KINDS: kinds}
        self.text = json.dumps(text).encode()

    def again(self, numbers: Sequence[float], on_device: Sequence[OnDevice] = ()) -> Statement:
        """Return the statement of a call of the same form, with other first numbers and others on a device."""
        other = object.__new__(Statement)
        later = [*numbers, *self.numbers[len(numbers) :]]
        other.__dict__.update(self.__dict__, numbers=later, on_device=on_device)
        return other

    def bytes_on_host(self) -> bytearray:
        """Return the record; the host waits for numbers on a device."""
        return self._packed([*on_host({i: x.number for i, x in enumerate(self.on_device)}).values(), *self.numbers])

    def record(self, device: torch.device | None = None) -> Tensor:
        """Return the record, (1, WORDS), on the device where it travels; None: on the host, which waits for numbers."""
        if device is None:
            return torch.frombuffer(self.bytes_on_host(), dtype=torch.int64)[None]
        on_device = [fact.number for fact in self.on_device]
        packed = torch.frombuffer(self._packed([*[0.0] * len(on_device), *self.numbers]), dtype=torch.int64)
        if device.type == "cuda":  # a copy from memory that is not pinned would wait for the GPU
            packed = packed.pin_memory().to(device, non_blocking=True)
        elif device.type != "cpu":
            packed = packed.to(device)
        packed = packed[None]
        if on_device:
            wide = [_number_on(device, number.detach().reshape(())) for number in on_device]
            numbers_of_records(packed, len(wide)).copy_(torch.stack(wide))
        return packed

    def _packed(self, numbers: Sequence[float]) -> bytearray:
        words = bytearray(RECORD_BYTES)
        struct.pack_into("=q16s2q", words, 0, _START, _digest(self.text), len(self.text), calling.get())
        struct.pack_into(f"={len(numbers)}d", words, 8 * _FIRST, *numbers)
        struct.pack_into("=q", words, RECORD_BYTES - 8, _END)
        return words


def signed(caller: str, facts: Mapping[str, Any]) -> str:
    """Return a rank's caller, with the number of its call or the dtype and shape that it passed, if facts name them."""
    dtype, shape = facts.get(DTYPE), facts.get(SHAPE)
    if NUMBER in facts:
        return f"{caller} #{facts[NUMBER]}"
    if not isinstance(dtype, str) or not isinstance(shape, list):
        return caller
    return f"{caller} of {dtype.removeprefix('torch.')}({', '.join(map(str, shape))})"


@dataclass(frozen=True)
class Slot:
    """The place of a number in a record, instead of a fact of this type."""

    index: int
    kind: Callable[[float], Any]


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


def take_numbers(facts: object, most: int = _MOST) -> tuple[Any, str, list[float], list[OnDevice]]:
    """Return facts with None for each number, their kinds, the numbers, and the numbers on a device.

    As many numbers as fit into a record, `most`, are taken, those on a device in any case.
    """
    numbers: list[float] = []
    on_device: list[OnDevice] = []
    kinds: list[str] = []

    def walk(value: Any) -> Any:
        kind = type(value)
        code = _KINDS.get(kind)
        if code is not None and len(numbers) < most and (kind is not int or -_EXACT <= value <= _EXACT):
            numbers.append(value)
            kinds.append(code)
            return None
        if kind is dict or (kind is not str and isinstance(value, Mapping)):
            items = value if all(isinstance(key, str) for key in value) else json.loads(json.dumps(value))
            return {key: walk(item) for key, item in items.items()}
        if kind is list or kind is tuple:
            return [walk(item) for item in value]
        if kind is OnDevice:
            on_device.append(value)
            kinds.append("d")
            return None
        kinds.append("-")
        return value

    without = walk(facts)
    if len(numbers) + len(on_device) <= _MOST:
        return without, "".join(kinds), numbers, on_device
    assert len(on_device) <= _MOST, "too many numbers on the device for a handshake; please report this"
    return take_numbers(facts, _MOST - len(on_device))


def with_slots(statement: dict[str, Any]) -> dict[str, Any]:
    """Return a statement with a :class:`Slot` for each number of its facts; those on a device come first."""
    if FACTS not in statement:
        return statement
    kinds: str = statement[KINDS]
    device, host, kind = iter(range(WORDS)), iter(range(kinds.count("d"), WORDS)), iter(kinds)

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        of_value = next(kind)
        return value if of_value == "-" else Slot(next(device if of_value == "d" else host), _TYPES[of_value])

    return {**statement, FACTS: walk(statement[FACTS])}


def as_unread(words: Tensor, count: int) -> Tensor:
    """Return records as those of a call that no rank reads, without its module and the first `count` numbers."""
    words = words.clone()
    words[:, _MODULE : _FIRST + count] = 0
    words[:, 0] = _UNREAD
    return words


def numbers_of_records(words: Tensor, count: int) -> Tensor:
    """Return the first numbers of records, (W, WORDS) -> (W, count), float64, a view."""
    return words.view(torch.float64)[:, _FIRST : _FIRST + count]


def _number_on(device: torch.device, number: Tensor) -> Tensor:
    if number.device.type == "cpu" and device.type != "cpu":  # filled in there: a copy would wait for the GPU
        return torch.full((), number.item(), dtype=torch.float64, device=device)
    return number.to(device, torch.float64)


class Records:
    """The records of all ranks, on the host.

    Args:
        words: (W, WORDS), int64, contiguous, on the CPU; or the bytes of one record.
    """

    def __init__(self, words: Tensor | bytearray) -> None:
        if isinstance(words, Tensor):
            self.words = words
        self._bytes = bytes_of(words) if isinstance(words, Tensor) else memoryview(words)
        self._integers, self._numbers = self._bytes.cast("q"), self._bytes.cast("d")
        self.modules = self._words(_MODULE)  # the number of the one that makes the call, on each rank
        self._has_one_text = all_equal([*zip(self._words(1), self._words(2), self._words(3), strict=True)])

    def foreign(self) -> list[int]:
        """Return the ranks whose words are no record."""
        frames = zip(self._words(0), self._words(WORDS - 1), strict=True)
        return [rank for rank, frame in enumerate(frames) if frame not in ((_START, _END), (_UNREAD, _END))]

    def unread(self) -> list[int]:
        """Return the ranks that do not read these records, because their call is like the one before."""
        starts = self._words(0)
        return [rank for rank, start in enumerate(starts) if start == _UNREAD] if _UNREAD in starts else []

    def different_lengths(self) -> list[int] | None:
        """Return the length of each rank's text, or None if all ranks have the same text."""
        return None if self._has_one_text else self._words(3)

    def announce(self, rank: int, text: bytes) -> bool:
        """Return whether a rank's record has the digest of this text."""
        first = rank * RECORD_BYTES + 8
        return self._bytes[first : first + 16] == _digest(text)

    def without_numbers(self, count: int) -> bytes | None:
        """Return all records without modules and the first `count` numbers of each; None if the ranks' texts differ."""
        if not self._has_one_text:
            return None
        if len(self.modules) == 1:  # of one process, whose form is known
            return b""
        words = as_unread(self.words, count)
        return bytes(bytes_of(words))

    def column(self, index: int, ranks: slice) -> list[float]:
        """Return one number of each of these ranks."""
        column: list[Any] = self._numbers[_FIRST + index :: WORDS][ranks].tolist()
        return column

    def _words(self, index: int) -> list[int]:
        return self._integers[index::WORDS].tolist()


def all_equal(column: Sequence[Any]) -> bool:
    """Return whether all values equal the first, at the speed of C; NaN equals nothing."""
    return column.count(column[0]) == len(column)
