"""The curves of a run for other programs: TensorBoard's event files, and Weights & Biases."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholebatch.app import UserError, read_bounded, replacing, writing

from ..config import TrainConfig

TENSORBOARD, WANDB, WANDB_ID = "tensorboard", "wandb", "wandb-id"
_MOST_ID_BYTES = 100


class TensorBoard:
    """Event files. Steps that a resumed run makes again replace those of before.

    Args:
        folder: the folder of the event files.
        done: steps that the run has made.

    Raises:
        ImportError: if tensorboard is not installed.
    """

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        # Readers take files in the order of their names: whole seconds, then the process's number, which may be lower.
        while [*folder.glob(f"events.out.tfevents.{int(time.time())}.*")]:
            time.sleep(0.05)
        with writing(repr(str(folder))):
            self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1 if folder.exists() else None)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Receive the figures after `step` steps, by names with slashes."""
        with writing(repr(str(self._folder))):
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Make everything received so far survive the end of this process."""
        with writing(repr(str(self._folder))):
            self._writer.flush()

    def close(self) -> None:
        """End, after the last figures."""
        with writing(repr(str(self._folder))):
            self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, which ignores steps that a resumed run makes again.

    Args:
        config: the configuration, with the project.
        folder: the run folder. The run's id is kept there, so that a resumed run continues its curves.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"--wandb needs the package wandb, which cannot be imported: {error}") from error
        with writing(repr(str(folder))):
            self._run: Any = wandb.init(
                project=config.wandb,
                name=folder.name,
                id=_id_of(folder / WANDB_ID),
                resume="allow",
                dir=str(folder),
                config=dataclasses.asdict(config),
            )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Receive the figures after `step` steps."""
        if step >= self._run.step:
            self._run.log(dict(figures), step=step)

    def flush(self) -> None:
        """Do nothing: wandb sends or writes by itself."""

    def close(self) -> None:
        """End, after the last figures."""
        self._run.finish()


Tracker = TensorBoard | WeightsAndBiases


def start_trackers(config: TrainConfig, folder: Path, done: int) -> tuple[list[Tracker], str]:
    """Return the trackers of this run, and a line about one that is missing, or ""."""
    trackers: list[Tracker] = []
    missing = ""
    if config.wandb is not None:
        trackers.append(WeightsAndBiases(config, folder))
    if config.tensorboard:
        try:
            trackers.append(TensorBoard(folder / TENSORBOARD, done))
        except ImportError:
            missing = "no TensorBoard files, because tensorboard is not installed: pip install tensorboard"
    return trackers, missing


def figures_of(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of nested values, by their path.

    >>> figures_of({"loss": 2.0, "tar": None, "both": {"recall@1": 1, "chance": float("nan")}}, "test/")
    {'test/loss': 2.0, 'test/both/recall@1': 1}
    """
    figures: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            figures |= figures_of(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            figures[prefix + name] = value
    return figures


def figures_of_step(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a line of metrics.jsonl, with those of training under train/."""
    training = {name: value for name, value in metrics.items() if name not in ("step", "validation")}
    return figures_of(training, "train/") | figures_of(metrics.get("validation", {}), "validation/")


def _id_of(file: Path) -> str:
    """Return the id of the run at Weights & Biases, from the file that keeps it."""
    if file.exists():
        text = read_bounded(file, _MOST_ID_BYTES).decode(errors="replace").strip()
        if not text.isascii() or not text.isalnum():
            raise UserError(f"{file} must hold the id of a run at Weights & Biases; remove it to start one there")
        return text
    run_id = secrets.token_hex(8)
    with replacing(file) as new:
        new.write(f"{run_id}\n".encode())
    return run_id
