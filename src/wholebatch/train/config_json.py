"""A configuration as JSON, in the config.json of a run; each field must be there, with a value of its type.

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from .._base.settings import shown
from .._base.user_error import UserError
from .config import PARTS, PATHS, HeadConfig, ModelConfig, TrainConfig
from .encoder_options import SideConfig, TextSideConfig
from .option_checks import check_options


def to_json(config: TrainConfig) -> str:
    """Return the configuration as JSON; `from_values` reads it, once it is parsed."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name != "trust"}
    return json.dumps(values, indent=2, default=str)


def from_values(given: Any, source: Path) -> TrainConfig:
    """Read the parsed values that `to_json` wrote; errors name their `source`."""
    try:
        values = {**given, "trust": False}
        for name in PATHS:
            values[name] = None if values[name] is None else Path(values[name])
        values["data"].encode()  # half of a surrogate pair is no path
        return _checked(values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{source} is not the configuration of a run of this version: {error}") from error


def options_of(source: Path, **values: Any) -> TrainConfig:
    """Return the defaults with some other values of the file `source`; UserError for what is no such option."""
    try:
        return _checked({**dataclasses.asdict(TrainConfig()), **values})
    except (ValueError, TypeError) as error:
        raise UserError(f"{source} is not an encoder of this version: {error}") from error


def _checked(values: dict[str, Any]) -> TrainConfig:
    parts = {name: _typed(part(), values[name]) for name, part in PARTS.items()}
    config = _typed(TrainConfig(), values | parts)
    check_options(config)
    return config


_OPTIONAL: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(PATHS, (Path,)), "until_step": (int,), "wandb": (str,), "m": (float, int),
    "learning_rate_factor": (float, int), "max_tokens": (int,),
}  # fmt: skip
_Config = TypeVar("_Config", TrainConfig, ModelConfig, HeadConfig, SideConfig, TextSideConfig)


def _typed(default: _Config, values: dict[str, Any]) -> _Config:
    """Return `default` with every field replaced; a value of another type than the default's is a TypeError."""
    names = [f.name for f in dataclasses.fields(default)]
    if sorted(values) != sorted(names):
        raise TypeError(f"expected the fields {sorted(names)}, got {sorted(values)}")
    for name in names:
        expected, value = type(getattr(default, name)), values[name]
        if expected is type(None):
            fits = value is None or (isinstance(value, _OPTIONAL[name]) and not isinstance(value, bool))
        else:
            is_auto = name == "chunk_size" and value == "auto"
            fits = type(value) is expected or (expected is float and type(value) is int) or is_auto
        if not fits:
            of = _OPTIONAL[name][0] if expected is type(None) else expected
            raise TypeError(f"{name} must be {of.__name__}, got {shown(value)}")
    return dataclasses.replace(default, **values)
