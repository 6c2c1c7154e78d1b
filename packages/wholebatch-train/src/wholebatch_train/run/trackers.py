"""The curves of a run as TensorBoard's event files."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholebatch.app import writing

TENSORBOARD = "tensorboard"


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
