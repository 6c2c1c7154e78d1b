"""What rank 0 shows: a live bar in a terminal, plain lines elsewhere, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .audited import Outcome
from .config import TrainConfig
from .run_folder import RunFolder
from .signals import resume_command
from .task import Task

_LINE_EVERY = 10  # steps between two plain lines


class Progress:
    """Shows nothing by itself: what the other ranks use."""

    def show_folder(self, folder: Path) -> None:
        """Where the run's files will be."""

    def show_audit(self, outcome: Outcome) -> None:
        """The gradient has been looked at."""

    def show_plan(self, line: str) -> None:
        """What the loss is going to take."""

    def start(self, config: TrainConfig, task: Task, *, size: int, done: int) -> None:
        """The data are loaded and training begins after `done` steps."""

    def step(self, metrics: dict[str, Any]) -> None:
        """A step is done."""

    def stop(self) -> None:
        """Leave the terminal as it was."""

    def show_checkpoint(self, step: int) -> None:
        """A signal has asked for a checkpoint, which there is after `step` steps."""

    def show_stop(self, signal: str, step: int, folder: Path, *, finished: bool) -> None:
        """A signal has stopped the run after `step` steps, or came while its report was written."""

    def report(self, folder: RunFolder, task: Task) -> None:
        """The run is finished."""


class ConsoleProgress(Progress):
    """A bar while training in a terminal; otherwise a line every few steps."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)  # a path is shown as it is
        self._bar: Bar | None = None
        self._found = ""

    def start(self, config: TrainConfig, task: Task, *, size: int, done: int) -> None:
        self._task = task
        self._console.print(
            f"{task.describe()}\n"
            f"global batch {config.batch_size:,} on {size} process{'es' if size > 1 else ''}"
            + (f", going on after step {done}" if done else "")
            + (", starting again: there was no checkpoint yet" if config.resume is not None and not done else "")
        )
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._bar.add_task("", total=config.steps, completed=done)
            self._bar.start()
        self._last = config.steps

    def step(self, metrics: dict[str, Any]) -> None:
        found = f", validation {self._task.headline(metrics['validation'])}" if "validation" in metrics else ""
        state = f"loss {metrics['loss']:.4f}"
        if self._bar is not None:
            self._found = found or self._found  # the bar keeps the last one in sight
            self._bar.update(self._bar.task_ids[0], completed=metrics["step"], description=state + self._found)
        elif metrics["step"] % _LINE_EVERY == 0 or metrics["step"] == self._last or "validation" in metrics:
            self._console.print(f"step {metrics['step']:4d}/{self._last}  {state}, {metrics['seconds']:.0f} s{found}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_folder(self, folder: Path) -> None:
        self._console.print(f"run folder: {folder}")

    def show_audit(self, outcome: Outcome) -> None:
        self._console.print(str(outcome))

    def show_plan(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def show_stop(self, signal: str, step: int, folder: Path, *, finished: bool) -> None:
        done = "the run was finished" if finished else f"stopped after step {step}, which has a checkpoint"
        line = f"{signal}: {done}" + ("" if finished else f"; go on with: {resume_command(folder)}")
        self._console.print(line)

    def show_checkpoint(self, step: int) -> None:
        self._console.print(f"a checkpoint was asked for: step {step} has one")

    def report(self, folder: RunFolder, task: Task) -> None:
        report = folder.report()
        title, columns, rows = task.table(report)
        table = Table(title=title, show_header=any(columns))
        for place, column in enumerate(columns):
            table.add_column(column, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
        self._console.print(f"trained for {report['seconds']:.0f} s; pictures and checkpoint are in {folder.path}")
