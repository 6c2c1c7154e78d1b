"""`--config`: options in a TOML file, or in the config.json of another run, on top of which the command line counts.

    data = "pairs.csv"      # relative to the folder of this file, as every path in it
    batch-size = 256        # an option without its dashes; batch_size is the same

    [model]
    embedding_size = 128

In the config.json of a run each field must be there, with a value of its type. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from wholebatch.app import DIGEST, UserError, option, parse_json, read_bounded, shown

from .config import PARTS, TrainConfig, absolute, value_of
from .option_checks import check_options

_MOST_BYTES = 2**20
RUN = "run"
"""The key of config.json under which no option stands."""
_OF_A_RUN = ("run_folder", "config", "resume", "until_step")  # a new run does not take them from another run


def with_file(base: TrainConfig, path: Path | None) -> TrainConfig:
    return base if path is None else merged(base, _values(path), path)


def naming_file(error: UserError, config: TrainConfig) -> UserError:
    """Return the error, with the configuration's file in front if an option that it names has its value from there."""
    if config.config is None:
        return error
    values, from_file = _values(config.config), with_file(TrainConfig(), config.config)
    for option_name in re.findall(r"--([a-z][a-z0-9.-]*)", str(error)):
        name = option_name.replace("-", "_")
        part, _, rest = name.rpartition(".")
        part_values = values.get(part, {}) if part else values
        in_file = isinstance(part_values, dict) and rest in part_values
        if in_file and value_of(config, name) == value_of(from_file, name):  # else the command line has another value
            return UserError(f"{config.config}: {error}")
    return error


def _values(path: Path) -> dict[str, Any]:
    """Return the options of the file by name, with underscores."""
    if path.suffix not in (".toml", ".json"):
        raise UserError(f"--config must be a .toml file, or the config.json of a run; got {str(path)!r}")
    try:
        text = read_bounded(path, _MOST_BYTES)
        values = parse_json(text, "its text") if path.suffix == ".json" else _parse_toml(text.decode())
    except FileNotFoundError as error:
        raise UserError(f"--config: there is no file {str(path)!r}") from error
    except OSError as error:
        raise UserError(f"--config: {str(path)!r} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--config: {path} is no file of options: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config: {path} must hold options by name, got {shown(values)}")
    if path.suffix == ".json":
        values = {name: value for name, value in values.items() if name not in (DIGEST, RUN, *_OF_A_RUN)}
    return _underscored(values, path)


def _underscored(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    underscored: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in underscored:
            raise UserError(f"{path} names {name} twice, with dashes and with underscores")
        underscored[name] = _underscored(value, path) if isinstance(value, dict) else value
    return underscored


def _parse_toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if any(line.count(".") > 64 and line.lstrip()[:1] != "#" for line in text.split("\n")):
        raise ValueError("a line has more than 64 dots")  # the parser's time grows as the square of a name's dots
    return tomllib.loads(text)


def merged(base: Any, values: Mapping[str, Any], path: Path, part: str = "") -> Any:
    """Return the dataclass `base` with these values; `part` is the prefix of its names, such as "model."."""
    hints = get_type_hints(type(base))
    changed = {}
    for name, value in values.items():
        if name not in hints:
            near = get_close_matches(name, hints, n=3)
            meant = f"; perhaps {' or '.join(part + each for each in near)}" if near else ""
            raise UserError(f"{path}: there is no option {part + name!r}{meant}; `wholebatch train --help` lists them")
        before = getattr(base, name)
        if dataclasses.is_dataclass(before):
            if not isinstance(value, dict):
                raise UserError(f"{path}: {part + name} must be a table, [{name}]; got {shown(value)}")
            changed[name] = merged(before, value, path, f"{part}{name}.")
        else:
            changed[name] = _convert(f"{part}{name}", hints[name], value, path)
    return dataclasses.replace(base, **changed)


def _convert(name: str, hint: Any, value: Any, path: Path) -> Any:
    """Return the value as an option of this type has it."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for choice in choices:
        if get_origin(choice) is Literal and (type(value), value) in ((type(each), each) for each in get_args(choice)):
            return value
        if choice is Path and isinstance(value, str):
            return path.absolute().parent / value
        if choice is float and (type(value) is float or (type(value) is int and abs(value) < 2**1023)):
            return float(value)
        if isinstance(choice, type) and type(value) is choice:
            return _join_folder(name, value, path) if isinstance(value, str) else value
    accepted = [each for choice in choices for each in _accepted_names(choice)]
    near = get_close_matches(value, accepted, n=1) if isinstance(value, str) else []
    raise UserError(
        f"{path}: {option(name)} must be {' or '.join(accepted)}, got {shown(value)}"
        + (f"; perhaps {near[0]!r}" if near else "")
    )


def _accepted_names(choice: Any) -> list[str]:
    if get_origin(choice) is Literal:
        return [str(each) for each in get_args(choice)]
    words = {int: "an integer", float: "a number", bool: "true or false", Path: "a path in quotes", str: "a text"}
    return [] if choice is type(None) else [words.get(choice, str(choice))]


def _join_folder(name: str, value: str, path: Path) -> str:
    """Return the text of an option; a path in it is relative to the folder of the file."""
    folder = path.absolute().parent
    if name == "data" and value != "glyphs":
        return str(folder / value)
    return absolute(value, folder) if name in ("image_encoder", "text_encoder") else value


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
