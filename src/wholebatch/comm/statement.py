"""A rank's statement in a handshake, as bytes that cannot be mistaken for data.

    wholebatch-1 LLLLLLLL CCCCCCCC {"caller": "clip_loss", ...}     L: length, C: CRC-32 of the JSON text, both in hex

A rank that reads other bytes has met another rank in the middle of another operation: the bytes may be features. The
prefix, the length and the checksum show it, and the error names the likely mistake of the other rank. Only the numbers
among the facts are not in this text: they travel in a record, see `records`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from zlib import crc32

FACTS, KINDS = "facts", "numbers"  # the fields of a statement: the facts, and the kinds of their numbers
_PREFIX = b"wholebatch-1 "
HEADER_BYTES = len(_PREFIX) + 2 * 9


class NoStatementError(ValueError):
    """The bytes are no statement."""


def encode(facts: Mapping[str, object]) -> bytes:
    """Return the statement of these facts, which are JSON values."""
    text = json.dumps(facts).encode()
    return _PREFIX + b"%08x %08x " % (len(text), crc32(text)) + text


def decode(statement: bytes) -> dict[str, Any]:
    """Return the facts of a statement, which may be followed by padding.

    Raises:
        NoStatementError: if the bytes do not begin with a whole statement.
    """
    header, rest = statement[:HEADER_BYTES], statement[HEADER_BYTES:]
    if not header.startswith(_PREFIX):
        raise NoStatementError(f"{len(statement)} bytes that are no statement of a call")
    try:
        length, checksum = (int(number, 16) for number in header[len(_PREFIX) :].split())
    except ValueError as error:
        raise NoStatementError("a statement of a call with a damaged header") from error
    text = rest[:length]
    if len(text) < length or crc32(text) != checksum:
        raise NoStatementError("a statement of a call that is cut short or overwritten")
    facts: dict[str, Any] = json.loads(text)
    return facts
