"""config.json of a run folder, the record of the run: its options, its data, its extensions and its starts.

The options stand at the top, as `--config` reads them, and the rest under "run". The file is sealed and replaced in one
step. A checkpoint holds digests of the options that decide the numbers, of the data, and of the extensions before its
step: an extension that was just written, and has trained nothing yet, changes no checkpoint.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from wholebatch.app import UserError, check_fields, read_bounded, replacing, sealed, unsealed

from ..config import TrainConfig
from ..config_file import RUN, from_values, to_json


class Extension(NamedTuple):
    """A decision, after `at` steps, to train until step `steps`."""

    at: int
    steps: int


class Schedule(NamedTuple):
    """The factor of the learning rate over the steps of a run.

    Args:
        planned_steps: the steps of the run's configuration.
        warmup_steps: steps of linear warm-up, at the start and after each extension, there at most half of its steps.
        extensions: the extensions of the run, in order.
    """

    planned_steps: int
    warmup_steps: int
    extensions: tuple[Extension, ...] = ()

    @property
    def steps(self) -> int:
        """The steps of the run, extensions included."""
        return self.extensions[-1].steps if self.extensions else self.planned_steps

    def rate(self, peak: float, step: int) -> float:
        """Return the learning rate of a step, counted from 0, whose largest value is `peak`.

        An extension at step A to N steps takes the cosine of N steps from there on, and reaches it from the rate that
        the run would have had at A, along a line of `warmup_steps` steps, or of half the steps that are left.

        >>> [round(Schedule(4, 2).rate(1.0, step), 3) for step in range(4)]
        [0.5, 0.854, 0.5, 0.146]
        >>> [round(Schedule(4, 2, (Extension(4, 8),)).rate(1.0, step), 3) for step in range(4, 8)]
        [0.25, 0.309, 0.146, 0.038]
        """
        if not self.extensions:
            warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
            cosine = (1 + math.cos(math.pi * step / self.planned_steps)) / 2
            return peak * warmup * cosine
        start, steps = self.extensions[-1]
        earlier = self._replace(extensions=self.extensions[:-1])
        if step < start:
            return earlier.rate(peak, step)
        before, after = earlier.rate(peak, start), Schedule(steps, self.warmup_steps).rate(peak, step)
        line = _steps_of_line(start, steps, self.warmup_steps)
        return before + min(1.0, (step - start + 1) / line) * (after - before)

    def extended(self, start: int, steps: int) -> Schedule:
        """Return the schedule of the run if, after `start` steps, it is to train until step `steps`.

        An earlier extension at the same step, after which nothing was trained, is replaced.
        """
        if steps == self.steps:
            return self
        kept = self._replace(extensions=tuple(each for each in self.extensions if each.at < start))
        return kept if steps == kept.steps else kept._replace(extensions=(*kept.extensions, Extension(start, steps)))


def describe_extension(step: int, steps: int, warmup_steps: int) -> str:
    """Return a line that states the learning rate of an extended run.

    >>> describe_extension(300, 600, 20)
    'extended at step 300 to 600: the learning rate goes on along the cosine of 600 steps, reached over 20 steps'
    """
    line = _steps_of_line(step, steps, warmup_steps)
    return (
        f"extended at step {step} to {steps}: the learning rate goes on along the cosine of {steps} steps, reached "
        f"over {line} step{'s' if line > 1 else ''}"
    )


def _steps_of_line(start: int, steps: int, warmup_steps: int) -> int:
    """Return over how many steps an extended run reaches its cosine: so few that it is reached before the end."""
    return max(1, min(warmup_steps, (steps - start) // 2))


CONFIG = "config.json"
_MOST_BYTES = 2**20
_MOST_STARTS, _MOST_STEPS = 1000, 10**9
REPEATED = ("ranks", "device", "chunk_size", "workers", "fsdp", "patience", "keep_best", "tensorboard", "wandb")
"""Options that may change when a run is resumed, and that a later command to resume repeats."""
FREE = (*REPEATED, "run_folder", "config", "resume", "trust", "until_step", "audit")
"""All options that may change: they do not change the numbers."""


class DataFacts(NamedTuple):
    """The data that a run was started with. `--resume` refuses others."""

    source: str
    """`--data`."""
    what: str
    """Their numbers, in words."""
    digest: str
    """Their hash."""

    def __str__(self) -> str:
        return f"{self.what}, hash {self.digest[:12]}"


class Start(NamedTuple):
    """A start or a resumption of a run. It informs the report; nothing of it enters the numbers."""

    at: str
    """Date and time, UTC."""
    step: int
    """Steps made before."""
    ranks: int
    device: str
    versions: str
    """Of this package, Python and torch."""
    plan: str
    audit: str | None
    """None: there was no audit, which a resumed run does not repeat."""


class Record(NamedTuple):
    """The record of a run."""

    config: TrainConfig
    data: DataFacts
    extensions: tuple[Extension, ...] = ()
    """The steps after which `--until-step` extended the run, and until which step."""
    starts: tuple[Start, ...] = ()

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.config.steps, self.config.warmup_steps, self.extensions)

    def with_start(self, start: Start, extensions: tuple[Extension, ...]) -> Record:
        """Return the record once the run has been started again; of very many starts some are left out."""
        starts = (*self.starts[:1], *[*self.starts[1:], start][1 - _MOST_STARTS :])
        return self._replace(starts=starts, extensions=extensions)

    def write(self, folder: Path) -> None:
        """Replace the file; or OSError."""
        lists = {name: [each._asdict() for each in getattr(self, name)] for name in ("extensions", "starts")}
        with replacing(folder / CONFIG) as file:
            file.write(sealed(json.loads(to_json(self.config)) | {RUN: {"data": self.data._asdict(), **lists}}))


def read_record(folder: Path) -> Record:
    file, (values, run) = folder / CONFIG, _read(folder)
    try:
        data = _check_types(DataFacts, run["data"])
        extensions = tuple(_check_types(Extension, each) for each in run["extensions"])
        starts = tuple(_check_types(Start, each) for each in run["starts"])
    except ValueError as error:
        raise _not_of_this_version(file, error) from error
    places = [each.at for each in extensions]
    if sorted({*places}) != places or any(not 0 < each.at <= each.steps <= _MOST_STEPS for each in extensions):
        raise UserError(f"{file} must extend the run at later and later steps, before its new end; was it edited?")
    return Record(from_values(values, file), data, extensions, starts)


def read_config(folder: Path) -> TrainConfig:
    return read_record(folder).config


def digests_of_run(folder: Path, step: int | None = None) -> dict[str, str | None]:
    """Return the digests of configuration and data, which tie weights to their run; None for a folder without these.

    With a `step`, also that of the extensions that changed steps before it, None if there are none.
    """
    if not (folder / CONFIG).exists():
        return dict.fromkeys(("config", "data", *([] if step is None else ["extensions"])))
    values, run = _read(folder)
    options = {name: value for name, value in values.items() if name not in FREE}
    digests: dict[str, str | None] = {"config": _digest(options), "data": _digest(run["data"])}
    if step is not None:
        before = [each for each in run["extensions"] if each["at"] < step]
        digests["extensions"] = _digest(before) if before else None
    return digests


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options in the file, and the facts of the run."""
    file = folder / CONFIG
    try:
        values = unsealed(read_bounded(file, _MOST_BYTES), "it")
        return values, check_fields(values.pop(RUN, None), RUN, {"data": dict, "extensions": list, "starts": list})
    except FileNotFoundError as error:
        raise UserError(f"--resume {folder}: that is no run folder, there is no {str(file)!r}") from error
    except OSError as error:
        raise UserError(f"--resume {folder}: {str(file)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise _not_of_this_version(file, error) from error


def _not_of_this_version(file: Path, error: ValueError) -> UserError:
    return UserError(f"{file} is not the configuration of a run of this version: {error}")


_Part = TypeVar("_Part", DataFacts, Extension, Start)


def _check_types(kind: type[_Part], value: Any) -> _Part:
    types = {name: get_args(hint) or hint for name, hint in get_type_hints(kind).items()}
    return kind(**check_fields(value, RUN, types))
