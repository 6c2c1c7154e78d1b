"""JSON from files: bounded before it is parsed, checked before it is used, and sealed by a digest of its own text.

A sealed text holds its SHA-256 under the key "sha256", computed with 64 zeros instead of the digest itself. So the
digest covers every bit of the text, spaces included.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

from .settings import shown

DIGEST = "sha256"
ZEROS = "0" * 64
_HEX = re.compile(r"[0-9a-f]{64}")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_MOST_DIGITS = 20  # of an integer of 64 bits
_DEPTH = 16

Types = Mapping[str, "type | tuple[type, ...]"]


def parse_json(text: bytes, source: str) -> Any:
    """Parse JSON that may come from anyone; `source` names it in errors.

    Raises:
        ValueError: no JSON or no UTF-8, brackets that are nested too deeply, a key that occurs twice, a number that is
            not finite, or an integer of more than 20 digits.
    """
    try:
        decoded = text.decode()
        _check_depth(decoded)
        return json.loads(
            decoded, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_integer, parse_float=_finite
        )
    except ValueError as error:
        raise ValueError(f"{source} is damaged, or no JSON of this program: {error}") from error


def check_fields(value: object, source: str, types: Types) -> dict[str, Any]:
    """Return `value` if it is an object of exactly these fields, each of exactly one of its types.

    Raises:
        ValueError: otherwise; `source` names the value.
    """
    if not isinstance(value, dict) or value.keys() != types.keys():
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{source} must have the fields {sorted(types)}, got {shown(got)}")
    for name, expected in types.items():
        allowed = expected if isinstance(expected, tuple) else (expected,)
        if type(value[name]) not in allowed:
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
            raise ValueError(f"{source}: {name} must be {names}, got {shown(value[name])}")
    return value


def sealed(value: Mapping[str, Any]) -> bytes:
    """Return the value as JSON with its digest."""
    return with_digest(json.dumps({DIGEST: ZEROS, **value}, indent=1, allow_nan=False).encode() + b"\n")


def unsealed(text: bytes, source: str) -> dict[str, Any]:
    """Parse a text that `sealed` has written.

    Raises:
        ValueError: a bit of it has changed.
    """
    value = parse_json(text, source)
    if not isinstance(value, dict):
        raise ValueError(f"{source} must hold an object, got {type(value).__name__}")
    check_digest(text, value.pop(DIGEST, None), source)
    return value


def with_digest(text: bytes) -> bytes:
    """Replace the first 64 zeros of the text by its digest."""
    return text.replace(ZEROS.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def check_digest(text: bytes, digest: object, source: str) -> None:
    """Raise ValueError unless the digest is that of the text."""
    if not is_digest(digest):
        raise ValueError(f"{source} has no digest; it is damaged, or was not written by this program")
    if hashlib.sha256(text.replace(digest.encode(), ZEROS.encode(), 1)).hexdigest() != digest:
        raise ValueError(
            f"{source} is damaged, or was edited: its digest is not that of its text; restore it from a copy"
        )


def is_digest(value: object) -> TypeGuard[str]:
    """Whether value is a SHA-256 in hexadecimal digits."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _check_depth(text: str) -> None:
    """Check how deep brackets outside of strings are nested, because json's parser recurses."""
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > _DEPTH:
            raise ValueError(f"brackets are nested more than {_DEPTH} deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("an object names a key twice")
    return unique


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is not a finite number")
    return number


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, expected at most {_MOST_DIGITS}")
    return int(text)
