"""The folder of a run. Rank 0 writes all of it, but for the other ranks' parts of head-STEP.

config.json              the record that --resume reads: options, hash of the data, each --until-step, each start
left_out.csv             with --skip-bad: each row without a text or a readable picture, and why; if there are any
metrics.jsonl            one line per step
checkpoint.safetensors   weights, optimizer and random state of the last checkpoint
best.safetensors         unless --no-keep-best: the weights of the best validation
model.safetensors        the final weights; of --task identify with the centers and the names of the classes
encoders/                what a later program needs to build the encoders again, before it reads the final weights
features/                features of the data that `wholebatch search` has searched; search.html has its last pictures
head-STEP/               of --task identify: the classifier after that many steps, every rank's shard
lock                     the process that writes here, which holds its lock
report.html              curves, test, examples, mistakes, checks and configuration, to look at in a browser
report.json              the figures of the test set, beside chance; the choices of kernel="auto" since the last start
tensorboard/             TensorBoard's event files
wandb-id, wandb/         with --wandb: the id of the run at Weights & Biases, and its files
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from wholebatch.app import UserError, parse_json, replacing, writing

from ..config import TrainConfig
from ..data.pictures import LeftOut, write_left_out
from ..encoders.make import FOLDER as ENCODERS
from ..encoders.make import digest_of, save_encoders
from ..report.page import Report, render
from ..tasks.task import Task
from .checkpoint import METRICS, first_lines, save_tensors
from .figures import FILE as BEST
from .lock import Lock, check_is_free
from .record import DataFacts, Extension, Record, Start, digests_of_run, read_record


class RunFolder:
    """The folder of one run, for its writer."""

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        self.path, self._lock = path, lock
        self._metrics = path / METRICS
        self._rows: list[dict[str, Any]] | None = None  # those of the file, from a read until the next line
        self._keep: int | None = None  # lines to keep when the next one is added
        self._lines, self._digest = 0, hashlib.sha256()
        self._is_begun = False  # whether these two are those of the file

    @classmethod
    def create(cls, path: Path, config: TrainConfig, data: DataFacts, left_out: Sequence[LeftOut] = ()) -> RunFolder:
        """Create a folder with the record of a run in it; UserError if it is not empty."""
        with writing(f"the run folder {str(path)!r}"):
            path.mkdir(parents=True, exist_ok=True)
            check_is_free(path)
            lock = Lock(path)
            try:
                check_is_free(path)  # another process may have held the lock until now
                Record(config, data).write(path)
                if left_out:
                    write_left_out(path, left_out)
            except BaseException:
                lock.close()
                raise
        return cls(path, lock)

    @classmethod
    def lock(cls, path: Path) -> RunFolder:
        """Lock the folder of a run to resume: from now on this process is its only writer."""
        with writing(f"the run folder {str(path)!r}"):
            return cls(path, Lock(path))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"the run folder {str(self.path)!r}")

    def resume_after(self, step: int) -> None:
        """Drop the lines of metrics.jsonl after `step`, as soon as the next line is added.

        Until then nothing changes: the checkpoint is yet to be read.
        """
        self._keep = step

    def append(self, metrics: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl; a number that is not finite is written as null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        line = json.dumps(finite).encode() + b"\n"
        with self._writing():
            if not self._is_begun:
                self._begin()
            with self._metrics.open("ab") as file:
                file.write(line)
        self._rows = None
        self._count(line)

    def _begin(self) -> None:
        """Keep the lines of the steps before, and count them."""
        kept = first_lines(self._metrics, self._keep) if self._metrics.exists() else []
        if self._keep is not None:
            with replacing(self._metrics) as whole:
                whole.write(b"".join(kept))
        for line in kept:
            self._count(line)
        self._keep, self._is_begun = None, True

    def _count(self, line: bytes) -> None:
        self._lines += 1
        self._digest.update(line)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, one for each step, without a last line that a kill cut short."""
        if self._rows is not None:
            return self._rows
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
        self._rows = rows
        return rows

    def digest_of_metrics(self, step: int) -> str | None:
        """Return the digest of the first `step` lines of metrics.jsonl, if these are all that there are; else None."""
        return self._digest.hexdigest() if self._is_begun and self._lines == step else None

    def finish(self, task: Task, report: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Write the final weights and the report."""
        encoders = self.path / ENCODERS
        with self._writing():
            save_encoders(encoders, task.module)
            facts = self._facts(task) | {ENCODERS: digest_of(encoders)}
        save_tensors(self.path / "model.safetensors", weights, facts)
        with self._writing():
            (self.path / "report.json").write_text(json.dumps(report, indent=2) + "\n")

    def keep_best(self, task: Task, weights: dict[str, Tensor], step: int) -> None:
        """Write the weights of the best validation so far, which is that after `step` steps."""
        save_tensors(self.path / BEST, weights, self._facts(task) | {"step": str(step)})

    def _facts(self, task: Task) -> dict[str, str]:
        """Return the metadata of a file of weights: those of the task, and the digests that tie it to this run."""
        return task.facts() | {name: digest for name, digest in digests_of_run(self.path).items() if digest is not None}

    def begin(self, start: Start, extensions: tuple[Extension, ...]) -> None:
        """Add a start to the record, and the extension that it has asked for."""
        with self._writing():
            read_record(self.path).with_start(start, extensions).write(self.path)

    def write_page(self, report: Report) -> None:
        with self._writing(), replacing(self.path / "report.html") as file:
            file.write(render(report).encode(errors="replace"))  # a file name need not be UTF-8


def _check_row(row: Any, number: int) -> None:
    """Raise ValueError unless a line is that of step `number` and holds only numbers."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] != number:
        raise ValueError(f"line {number} is not that of step {number}")
    others = {name: value for name, value in row.items() if name != "validation"}
    if "loss" not in row or any(type(value) not in (int, float, type(None)) for value in others.values()):
        raise ValueError(f"line {number} must hold a loss, and only numbers")
