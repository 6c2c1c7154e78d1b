"""A configuration as JSON, in the config.json of a run; each field must be there, with a value of its type.

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wholebatch.app import UserError

from .config import PARTS, TrainConfig
from .config_file import merged
from .option_checks import check_options


def to_json(config: TrainConfig) -> str:
    """Return the configuration as JSON; `from_values` reads it, once it is parsed."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name != "trust"}
    return json.dumps(values, indent=2, default=str)


def from_values(values: Any, source: Path) -> TrainConfig:
    """Read the parsed values that `to_json` wrote; errors name their `source`."""
    return _read_config(lambda: {**values, "trust": False}, source, "the configuration of a run")


def options_of(source: Path, **values: Any) -> TrainConfig:
    """Return the defaults with some other values of the file `source`; UserError for what is no such option."""
    return _read_config(lambda: {**dataclasses.asdict(TrainConfig()), **values}, source, "an encoder")


def _read_config(make_values: Callable[[], dict[str, Any]], source: Path, name: str) -> TrainConfig:
    try:
        values = make_values()
        values["data"].encode()  # half of a surrogate pair is no path
        for part, kind in {"": TrainConfig, **PARTS}.items():
            names, present = sorted(f.name for f in dataclasses.fields(kind)), sorted(values[part] if part else values)
            if names != present:
                raise TypeError(f"expected the fields {names}, got {present}")
        config: TrainConfig = merged(TrainConfig(), values, source)
        check_options(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{source} is not {name} of this version: {str(error).removeprefix(f'{source}: ')}") from error
    return config
