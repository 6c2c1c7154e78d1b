"""What a run leaves behind, all of it written by rank 0.

config.json              the configuration, read back by --resume
metrics.jsonl            one line per step
checkpoint.safetensors   weights, optimiser and random state after the last checkpointed step
model.safetensors        the final weights alone; of --task identify with the centres, and the classes' names beside
head-STEP/               of --task identify: the classifier after as many steps, every rank's part of it
lock                     which process writes here; locked as long as it does
report.json              what the test set says, beside chance
curves.png               loss and validation over the steps
retrieval.png            of --task retrieve: held-out images beside the five texts that the model finds most similar
look_alikes.png          of --task identify: which classes are taken for which
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from .._user_error import UserError
from .checkpoint import save_tensors
from .config import TrainConfig
from .lock import FILE as LOCK_FILE
from .lock import Lock
from .pictures import draw_curves
from .task import Task

_PARTIAL_CONFIG = "config.partial"


class RunFolder:
    """A folder that belongs to one run."""

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        self.path = path
        self._metrics = path / "metrics.jsonl"
        self._lock = lock

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> RunFolder:
        """A new folder with the configuration in it; refuses one that holds a run already."""
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            _refuse_others(path)
            lock = Lock(path)
            try:
                _refuse_others(path)  # another process may have had the lock until now
                partial = path / _PARTIAL_CONFIG
                partial.write_text(config.to_json() + "\n")
                partial.replace(path / "config.json")
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
        """Drop later lines of metrics.jsonl, which come again."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        if [line["step"] for line in kept] != list(range(1, step + 1)):
            raise UserError(f"{self._metrics} does not hold the steps 1 to {step} of the checkpoint; was it edited?")
        partial = self._metrics.with_suffix(".partial")
        with _writing(self.path):
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            partial.replace(self._metrics)

    def append(self, metrics: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with _writing(self.path), self._metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl; a last line that a kill cut short is left out."""
        rows = []
        try:
            lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
            for number, line in enumerate(lines, 1):
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    if number < len(lines):
                        raise
            if not all(isinstance(row, dict) and {"step", "loss"} <= row.keys() for row in rows):
                raise ValueError("a line without step and loss")
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
        return dict(json.loads((self.path / "report.json").read_text()))


def _refuse_others(path: Path) -> None:
    """A folder is empty, but for the files of a run that was killed before it had a configuration."""
    if {entry.name for entry in path.iterdir()} - {LOCK_FILE, _PARTIAL_CONFIG}:
        raise UserError(
            f"{str(path)!r} is not empty; go on with the run in it by --resume {path}, or choose another --run-folder"
        )


def read_config(path: Path) -> TrainConfig:
    """The configuration of the run in `path`."""
    file = path / "config.json"
    try:
        text = file.read_text()
    except FileNotFoundError as error:
        raise UserError(f"--resume {path}: that is no run folder, there is no {str(file)!r}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--resume {path}: {str(file)!r} cannot be read: {error}") from error
    return TrainConfig.from_json(text, file)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"the run folder {str(path)!r} cannot be written: {error.strerror or error}") from error
