"""The facts of a handshake: what a rank sends, and what all ranks then know.

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
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.checks import on_host
from .._base.tensor_file import bytes_of
from .modules import calling

Facts = dict[str, Any]  # JSON values by name
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
    """A rank's facts about the arguments of `caller`, or its mistake: a text, and the numbers that the text leaves out.

    The facts are JSON values or `OnDevice`, others a TypeError; {} with a mistake, its message and its kind.
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


def with_slots(text: dict[str, Any]) -> Text:
    """Return the contents of a text, whose slots for numbers on a device come first."""
    kinds: str = text.get(KINDS, "")
    device, host, kind = iter(range(WORDS)), iter(range(kinds.count("d"), WORDS)), iter(kinds)

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        place = next(kind)
        return value if place == "-" else Slot(next(device if place == "d" else host), _TYPES[place])

    return Text(text[CALLER], walk(text.get(FACTS, {})), text.get(MISTAKE))


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


class Text(NamedTuple):
    """A text that was read, with a :class:`Slot` for each number of its facts."""

    caller: str
    facts: Facts
    mistake: Sequence[str] | None


@lru_cache(maxsize=64)
def _read(text: bytes) -> Text:
    """Return the contents of a text: that of a loss is the same in each step."""
    return with_slots(json.loads(text))


class FactsByRank(Sequence[Facts]):
    """The facts of rank 0, 1, ..., W - 1, made from records and texts when they are asked for: a loss needs few.

    Args:
        statement: this rank's, whose text is that of all ranks until `read_texts`.
        words: the records of all ranks: (W, WORDS), int64, contiguous, on the CPU; or the bytes of one record.
    """

    def __init__(self, statement: Statement, words: Tensor | bytearray) -> None:
        if isinstance(words, Tensor):
            self.words = words
        self.statement = statement
        self._bytes = bytes_of(words) if isinstance(words, Tensor) else memoryview(words)
        self._integers, self._numbers = self._bytes.cast("q"), self._bytes.cast("d")
        self.modules = self._words(_MODULE)  # the number of the one that makes the call, on each rank
        self.has_one_text = _all_equal([*zip(self._words(1), self._words(2), self._words(3), strict=True)])
        self._columns: Mapping[str, Sequence[Any]] = {}
        self._set_texts([_read(statement.text)] * len(self.modules))

    def _set_texts(self, texts: Sequence[Text]) -> None:
        size = len(texts)
        ranks = [slice(0, size)] if self.has_one_text else [slice(rank, rank + 1) for rank in range(size)]
        self.texts, self._facts = texts, [(texts[some.start].facts, some) for some in ranks]

    def foreign(self) -> list[int]:
        """Return the ranks whose words are no record."""
        frames = zip(self._words(0), self._words(WORDS - 1), strict=True)
        return [rank for rank, frame in enumerate(frames) if frame not in ((_START, _END), (_UNREAD, _END))]

    def unread(self) -> list[int]:
        """Return the ranks that do not read these records, because their call is like the one before."""
        starts = self._words(0)
        return [rank for rank, start in enumerate(starts) if start == _UNREAD] if _UNREAD in starts else []

    def lengths(self) -> list[int]:
        """Return the length of each rank's text."""
        return self._words(3)

    def read_texts(self, texts: Sequence[bytes]) -> list[int]:
        """Read the text of each rank; return the ranks whose records have the digest of another."""
        digests = [self._bytes[first : first + 16] for first in range(8, len(self._bytes), RECORD_BYTES)]
        others = [rank for rank, text in enumerate(texts) if digests[rank] != _digest(text)]
        if not others:
            self._set_texts([*map(_read, texts)])
        return others

    def without_numbers(self, count: int) -> bytes | None:
        """Return all records without modules and the first `count` numbers of each; None if the ranks' texts differ."""
        if not self.has_one_text:
            return None
        if len(self.modules) == 1:  # of one process, whose form is known
            return b""
        words = as_unread(self.words, count)
        return bytes(bytes_of(words))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, rank: Any) -> Any:
        return self._filled[rank]

    def __eq__(self, other: object) -> bool:
        return self._filled == (other._filled if isinstance(other, FactsByRank) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._filled)

    @cached_property
    def _filled(self) -> list[Facts]:
        stated = [rank_facts for facts, ranks in self._facts for rank_facts in self._column(facts, ranks)]
        return [
            {**rank_facts, **{name: column[rank] for name, column in self._columns.items()}}
            for rank, rank_facts in enumerate(stated)
        ]

    def plus(self, columns: Mapping[str, Sequence[Any]]) -> FactsByRank:
        """Return these facts and further ones: one value of each rank, by name."""
        further = object.__new__(FactsByRank)
        further.__dict__.update(self.__dict__, _columns={**self._columns, **columns})
        further.__dict__.pop("_filled", None)
        return further

    def column(self, *path: str) -> list[Any]:
        """Return one fact of every rank, rank 0's first; further names lead into a fact that is a mapping."""
        if path[0] in self._columns:
            return [_value_at(value, path[1:]) for value in self._columns[path[0]]]
        return [value for facts, ranks in self._facts for value in self._column(_value_at(facts, path), ranks)]

    def columns_of_mapping(self, name: str) -> dict[str, list[Any]] | None:
        """Return, for each entry of a fact that is a mapping, its value on every rank; None if the names differ."""
        names = [facts[name].keys() for facts, _ in self._facts]
        return {key: self.column(name, key) for key in names[0]} if _all_equal(names) else None

    def differing(self, name: str) -> list[Any] | None:
        """Return the values of a fact if they differ between ranks, None for a rank without it; NaN equals NaN."""
        values = self._columns.get(name) or [
            value for facts, ranks in self._facts for value in self._column(facts.get(name), ranks)
        ]
        same = _all_equal(values) or all(
            value == values[0] or json.dumps(value) == json.dumps(values[0]) for value in values
        )
        return None if same else [*values]

    def _column(self, fact: Any, ranks: slice) -> list[Any]:
        """Return a fact of ranks with one text, with numbers instead of slots."""
        if isinstance(fact, Slot):
            return [*map(fact.kind, self._numbers[_FIRST + fact.index :: WORDS][ranks].tolist())]
        if isinstance(fact, list) and fact:
            return [[*row] for row in zip(*(self._column(item, ranks) for item in fact), strict=True)]
        if isinstance(fact, dict) and fact:
            rows = zip(*(self._column(item, ranks) for item in fact.values()), strict=True)
            return [dict(zip(fact, row, strict=True)) for row in rows]
        return [fact] * (ranks.stop - ranks.start)

    def _words(self, index: int) -> list[int]:
        return self._integers[index::WORDS].tolist()


def _value_at(facts: Any, path: Sequence[str]) -> Any:
    for name in path:
        facts = facts[name]
    return facts


def _all_equal(column: Sequence[Any]) -> bool:
    """Return whether all values equal the first, at the speed of C; NaN equals nothing."""
    return column.count(column[0]) == len(column)
