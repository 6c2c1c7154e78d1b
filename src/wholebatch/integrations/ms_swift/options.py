"""The environment variables of ms-swift's InfoNCE, with its names and defaults."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

VARIABLES = (
    "INFONCE_TEMPERATURE",
    "INFONCE_USE_BATCH",
    "INFONCE_HARD_NEGATIVES",
    "INFONCE_MASK_FAKE_NEGATIVE",
    "INFONCE_FAKE_NEG_MARGIN",
    "INFONCE_INCLUDE_QQ",
    "INFONCE_INCLUDE_DD",
)  # in the order of the fields of Options
_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


class Options(NamedTuple):
    """The settings of one call."""

    temperature: float
    use_batch: bool
    hard_negatives: int | None
    mask_fake_negative: bool
    fake_neg_margin: float
    include_qq: bool
    include_dd: bool


def read_options() -> Options:
    """Read the variables, as ms-swift does at each call.

    Raises:
        ValueError: if one of them has no valid value.
    """
    temperature = _number("INFONCE_TEMPERATURE", "0.1")
    if not temperature > 0:
        raise ValueError(f"INFONCE_TEMPERATURE must be positive, got {temperature}; ms-swift's default is 0.1")
    return Options(
        temperature,
        _flag("INFONCE_USE_BATCH", "True"),
        _count("INFONCE_HARD_NEGATIVES"),
        _flag("INFONCE_MASK_FAKE_NEGATIVE", "False"),
        _number("INFONCE_FAKE_NEG_MARGIN", "0.1"),
        _flag("INFONCE_INCLUDE_QQ", "False"),
        _flag("INFONCE_INCLUDE_DD", "False"),
    )


def _flag(name: str, default: str) -> bool:
    text = os.environ.get(name, default)
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"{name} must be True or False, got {text!r}")


def _number(name: str, default: str) -> float:
    text = os.environ.get(name, default)
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number, got {text!r}; ms-swift's default is {default}")
    return found


def _count(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal():
        raise ValueError(f"{name} must be a whole number, 0 or more, got {text!r}; leave it unset for all negatives")
    return int(text)
