"""The figures of a run: its best validation, its speed and memory, and its curves in TensorBoard and elsewhere."""

from __future__ import annotations

import dataclasses
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from wholebatch.app import UserError, read_bounded, replacing, shown, writing

from ..config import TrainConfig
from ..tasks.task import Task

FILE = "best.safetensors"
_WHILE = 3  # validations without a better one, after which a run that learns by heart is warned of


class Best:
    """The best validation so far, found again from metrics.jsonl when a run is resumed.

    Args:
        task: it knows the headline figure of a validation; a larger one is better.
        patience: validations without a better one after which the run ends; 0: never.
        since: steps before the last extension of the run, after which patience starts again.
        earlier: the metrics of the steps made so far.
    """

    def __init__(self, task: Task, patience: int, since: int, earlier: Iterable[Mapping[str, Any]]) -> None:
        self._task, self._patience, self._since = task, patience, since
        self.step, self.figure = 0, float("-inf")
        self._without = 0
        self._figure = self._loss = self._loss_of_best = float("nan")  # of the last validation, and of the best
        self._losses: list[float] = []  # since the last validation
        self._is_said = False
        for metrics in earlier:
            try:
                self.is_beaten_by(metrics)
            except (KeyError, TypeError, ValueError) as error:  # the figures of a file that somebody has edited
                validation = shown(metrics["validation"])
                raise UserError(
                    f"metrics.jsonl: step {metrics['step']} has no figures in its validation: {validation}"
                ) from error

    def is_beaten_by(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the validation of this step, if it has one, is the best so far."""
        loss = metrics.get("loss")
        self._losses.append(math.inf if loss is None else loss)
        if not metrics.get("validation"):
            return False
        self._loss, self._losses = fmean(self._losses), []
        self._figure, step = self._task.headline_figure(metrics["validation"]), metrics["step"]
        better = self._figure > self.figure
        if better:
            self.step, self.figure, self._loss_of_best, self._is_said = step, self._figure, self._loss, False
        if step > self._since:
            self._without = 0 if better else self._without + 1
        return better

    @property
    def is_over(self) -> bool:
        return 0 < self._patience <= self._without

    def warning(self, *, is_kept: bool) -> str:
        """Return a line, once, about a run that learns by heart while it can still be ended, else "".

        That is a run whose training loss falls though no validation has been better for a while, and the last is worse.
        """
        if self._is_said or self._without < _WHILE or self._figure >= self.figure or self._loss >= self._loss_of_best:
            return ""
        self._is_said = True
        return (
            f"note: the run learns by heart: since step {self.step:,}, whose validation was the best, the training "
            f"loss has fallen from {self._loss_of_best:.3g} to {self._loss:.3g} and no validation was better; "
            "Ctrl-C ends it" + (f", and {FILE} has the weights of step {self.step:,}" if is_kept else "")
        )


MEASURED = ("seconds", "examples_per_second", "peak_rss_bytes", "peak_cuda_bytes")
"""Fields of metrics.jsonl that differ between two runs with the same numbers."""
_WINDOW = 20  # steps
_STATUS = Path("/proc/self/status")


class Pace:
    """The rate of the last steps of this process, validations and checkpoints among them."""

    def __init__(self, batch_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._batch_size, self._clock = batch_size, clock
        self._ends = deque([clock()], maxlen=_WINDOW + 1)

    def step(self) -> float:
        """Return the examples per second over the last steps, once one more is complete."""
        self._ends.append(self._clock())
        passed = self._ends[-1] - self._ends[0]
        return self._batch_size * (len(self._ends) - 1) / max(passed, 1e-9)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the most bytes that this process has held so far, in its memory and on its GPU, where they are known."""
    peaks = {}
    if (resident := _peak_resident()) is not None:
        peaks["peak_rss_bytes"] = resident
    if device.type == "cuda":
        peaks["peak_cuda_bytes"] = torch.cuda.max_memory_allocated(device)
    return peaks


def _peak_resident() -> int | None:
    if _STATUS.exists():  # getrusage's peak includes that of the program that has started this one
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return None
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id"
_MOST_ID_BYTES = 100


class TensorBoard:
    """Event files, in which steps that a resumed run makes again replace those of before; ImportError without these."""

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
    """A run of Weights & Biases, which ignores steps that a resumed run makes again."""

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
        if step >= self._run.step:
            self._run.log(dict(figures), step=step)

    def flush(self) -> None:
        """Do nothing: wandb sends or writes by itself."""

    def close(self) -> None:
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
