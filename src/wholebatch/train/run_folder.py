"""What a run leaves behind, all of it written by rank 0.

config.json              the configuration, read back by --resume
metrics.jsonl            one line per step
checkpoint.safetensors   weights, optimizer and random state after the last checkpointed step
model.safetensors        the final weights alone; of --task identify with the centers, and the classes' names beside
head-STEP/               of --task identify: the classifier after as many steps, every rank's part of it
lock                     which process writes here; locked as long as it does
report.json              what the test set says, beside chance
curves.png               loss and validation over the steps
retrieval.png            of --task retrieve: held-out images beside the five texts that the model finds most similar
look_alikes.png          of --task identify: which classes are taken for which
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from .._bounded_json import parse_json, sealed, unsealed
from .._files import read_bounded, replacing
from .._user_error import UserError
from .checkpoint import CONFIG, METRICS, MOST_CONFIG_BYTES, first_lines, save_tensors
from .config import TrainConfig
from .lock import FILE as LOCK_FILE
from .lock import Lock, refuse_a_writer
from .pictures import draw_curves
from .task import Task

_MOST_REPORT_BYTES = 2**24
_PARTIAL_CONFIG = f"{CONFIG}.partial"


class RunFolder:
    """A folder that belongs to one run."""

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        self.path = path
        self._metrics = path / METRICS
        self._lock = lock
        self._keep: int | None = None  # lines of metrics.jsonl, when the next one is added

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> RunFolder:
        """A new folder with the configuration in it; refuses one that holds a run already."""
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            _refuse_others(path)
            lock = Lock(path)
            try:
                _refuse_others(path)  # another process may have had the lock until now
                with replacing(path / CONFIG) as file:
                    file.write(sealed(json.loads(config.to_json())))
            except BaseException:
                lock.close()
                raise
        return cls(path, lock)

    @classmethod
    def lock(cls, path: Path) -> RunFolder:
        """The folder of a run that is to go on, whose only writer this process is from now on."""
        with _writing(path):
            return cls(path, Lock(path))

    def close(self) -> None:
        """Let another process write."""
        if self._lock is not None:
            self._lock.close()

    def go_on_after(self, step: int) -> None:
        """Drop later lines of metrics.jsonl when the first one comes again.

        Until the checkpoint has been read, nothing in the folder is changed.
        """
        if len(self.metrics()) < step:
            raise UserError(f"{self._metrics} does not hold the steps 1 to {step} of the checkpoint; was it edited?")
        self._keep = step

    def append(self, metrics: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl; a number that is not finite is null there."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        with _writing(self.path):
            if self._keep is not None:
                kept = first_lines(self._metrics, self._keep) if self._metrics.exists() else []
                with replacing(self._metrics) as whole:
                    whole.write(b"".join(kept))
                self._keep = None
            with self._metrics.open("a") as file:
                file.write(json.dumps(finite) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl, one for each step; a last line that a kill cut short is left out."""
        rows = []
        try:
            lines = first_lines(self._metrics, None) if self._metrics.exists() else []
            for number, line in enumerate(lines, 1):
                try:
                    rows.append(parse_json(line, f"line {number}"))
                except ValueError:
                    if line.endswith(b"\n"):
                        raise
            for number, row in enumerate(rows, 1):
                _check_row(row, number)
        except (OSError, ValueError) as error:
            raise UserError(f"{self._metrics} cannot be read as the metrics of a run ({error})") from error
        return rows

    def finish(self, task: Task, report: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Final weights, report and pictures."""
        save_tensors(self.path / "model.safetensors", weights, task.facts())
        with _writing(self.path):
            (self.path / "report.json").write_text(json.dumps(report, indent=2) + "\n")
            draw_curves(self.metrics(), task.curves, task.validation_title, self.path / "curves.png")
            task.draw(self.path)

    def report(self) -> dict[str, Any]:
        """What `finish` has written."""
        file = self.path / "report.json"
        return dict(parse_json(read_bounded(file, _MOST_REPORT_BYTES), str(file)))


def _refuse_others(path: Path) -> None:
    """A folder is empty, but for the files of a run that was killed before it had a configuration."""
    if not {entry.name for entry in path.iterdir()} - {LOCK_FILE, _PARTIAL_CONFIG}:
        return
    if not (path / CONFIG).exists():
        raise UserError(f"{str(path)!r} is not empty, and no run; choose another --run-folder")
    refuse_a_writer(path)
    raise UserError(
        f"{str(path)!r} is not empty; go on with the run in it by --resume {shlex.quote(str(path))}, or choose another "
        "--run-folder"
    )


def read_config(path: Path) -> TrainConfig:
    """The configuration of the run in `path`."""
    file = path / CONFIG
    try:
        values = unsealed(read_bounded(file, MOST_CONFIG_BYTES), "it")
    except FileNotFoundError as error:
        raise UserError(f"--resume {path}: that is no run folder, there is no {str(file)!r}") from error
    except OSError as error:
        raise UserError(f"--resume {path}: {str(file)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise UserError(f"{file} is not the configuration of a run of this version: {error}") from error
    return TrainConfig.from_values(values, file)


def _check_row(row: Any, number: int) -> None:
    """A line of metrics.jsonl: of this step, and of numbers alone."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] != number:
        raise ValueError(f"line {number} is not that of step {number}")
    others = {name: value for name, value in row.items() if name != "validation"}
    if "loss" not in row or any(type(value) not in (int, float, type(None)) for value in others.values()):
        raise ValueError(f"line {number} must hold a loss, and numbers alone")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"the run folder {str(path)!r} cannot be written: {error.strerror or error}") from error
