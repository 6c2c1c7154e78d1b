"""JSON from files: bounded before it is parsed, checked before it is believed, and sealed by a digest of its own text.

A sealed text names its SHA-256 under the key "sha256", computed with 64 zeros in the place of the digest itself. So
every bit of it counts, spaces included.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

from ._settings import shown

DIGEST = "sha256"
ZEROS = "0" * 64
_HEX = re.compile(r"[0-9a-f]{64}")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_MOST_DIGITS = 20  # of an integer of 64 bits
_DEPTH = 16

Types = Mapping[str, "type | tuple[type, ...]"]


def parse_json(text: bytes, what: str) -> Any:
    """Parse JSON that may come from anyone; `what` names it in errors.

    Raises:
        ValueError: for what is no JSON or no UTF-8, is nested too deeply, names a key twice, or has a number that is
            not finite or an integer of more than 20 digits.
    """
    try:
        decoded = text.decode()
        _check_depth(decoded)
        return json.loads(
            decoded, object_pairs_hook=_unique, parse_constant=_not_finite, parse_int=_integer, parse_float=_finite
        )
    except ValueError as error:
        raise ValueError(f"{what} is damaged, or no JSON of this program: {error}") from error


def check_fields(value: object, what: str, types: Types) -> dict[str, Any]:
    """Return `value`, if it is an object of exactly these fields, each of exactly one of its types.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(value, dict) or value.keys() != types.keys():
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{what} must have the fields {sorted(types)}, got {shown(found)}")
    for name, expected in types.items():
        allowed = expected if isinstance(expected, tuple) else (expected,)
        if type(value[name]) not in allowed:
            names = " or ".join("None" if one is type(None) else one.__name__ for one in allowed)
            raise ValueError(f"{what}: {name} must be {names}, got {shown(value[name])}")
    return value


def sealed(value: Mapping[str, Any]) -> bytes:
    """The value as JSON, with its digest."""
    return with_digest(json.dumps({DIGEST: ZEROS, **value}, indent=1, allow_nan=False).encode() + b"\n")


def unsealed(text: bytes, what: str) -> dict[str, Any]:
    """Parse what `sealed` has written.

    Raises:
        ValueError: if a bit of it has changed.
    """
    value = parse_json(text, what)
    if not isinstance(value, dict):
        raise ValueError(f"{what} must hold an object, got {type(value).__name__}")
    check_digest(text, value.pop(DIGEST, None), what)
    return value


def with_digest(text: bytes) -> bytes:
    """The text with its digest in the place of the first 64 zeros."""
    return text.replace(ZEROS.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def check_digest(text: bytes, digest: object, what: str) -> None:
    """The text is the one of which this is the digest.

    Raises:
        ValueError: if it is not.
    """
    if not is_digest(digest):
        raise ValueError(f"{what} has no digest; it is damaged, or was not written by this program")
    if hashlib.sha256(text.replace(digest.encode(), ZEROS.encode(), 1)).hexdigest() != digest:
        raise ValueError(f"{what} is damaged, or was edited: its digest is not that of its text")


def is_digest(value: object) -> TypeGuard[str]:
    """Whether it is a SHA-256 in hexadecimal digits."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _check_depth(text: str) -> None:
    """Brackets outside of strings are nested at most so deep; json's parser would recurse."""
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > _DEPTH:
            raise ValueError(f"brackets are nested more than {_DEPTH} deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object names a key twice")
    return found


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is no finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is no finite number")
    return number


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, expected at most {_MOST_DIGITS}")
    return int(text)
