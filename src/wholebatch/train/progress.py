"""The output of rank 0: a live bar in a terminal, plain lines elsewhere, and the report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from wholebatch.planning.units import amount, duration

from .._base.user_error import printable
from .audited import Outcome
from .config import TrainConfig
from .run.resume import command_line, read_config
from .run.run_folder import RunFolder
from .tasks.task import Task

_LINE_EVERY = 10  # steps between two plain lines
_EARLY = 2  # steps after the first one of a start, by which the time left can be estimated


class Progress:
    """The silent output of the other ranks, and the events that an output shows."""

    def show_folder(self, folder: Path) -> None:
        """The run folder is ready."""

    def show_audit(self, outcome: Outcome) -> None:
        """The audit before training has passed."""

    def show_data(self, line: str) -> None:
        """Show a choice that the data have made."""

    def show_plan(self, line: str) -> None:
        """The plan of the loss is known."""

    def start(self, config: TrainConfig, task: Task, *, size: int, done: int, steps: int) -> None:
        """Training begins after `done` earlier steps, and is to make `steps` in all."""

    def show_note(self, line: str) -> None:
        """Something is worth a line."""

    def step(self, metrics: dict[str, Any]) -> None:
        """A step is complete."""

    def stop(self) -> None:
        """Restore the terminal."""

    def show_checkpoint(self, step: int) -> None:
        """A signal has requested a checkpoint, which is saved after `step` steps."""

    def show_stop(self, signal: str, step: int, how_to_resume: str, *, finished: bool) -> None:
        """A signal has stopped the run after `step` steps, or came when all steps were made."""

    def report(self, folder: RunFolder, task: Task) -> None:
        """The run is complete."""


class _BarAndFigures(Bar):
    """A bar above the figures of the last step, which take as many lines as they need."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.figures, no_wrap=False, overflow="fold")  # though the console cuts off no lines


class ConsoleProgress(Progress):
    """A bar while training in a terminal; otherwise a line every few steps.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)  # a path is shown as it is
        self._bar: _BarAndFigures | None = None
        self._validation = ""
        self._began, self._first_ended = 0.0, 0.0
        self._first, self._last = 0, 0  # steps

    def start(self, config: TrainConfig, task: Task, *, size: int, done: int, steps: int) -> None:
        self._task = task
        self._console.print(
            f"{task.describe()}\n"
            f"global batch {config.batch_size:,} on {size} process{'es' if size > 1 else ''}"
            + (f", resuming after step {done}" if done else "")
            + (", starting again: there was no checkpoint yet" if config.resume is not None and not done else "")
        )
        if self._console.is_terminal:
            self._bar = _BarAndFigures(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                console=self._console,
            )  # fmt: skip
            self._bar.add_task("", total=steps, completed=done)
            self._bar.start()
        self._first, self._last, self._began = done + 1, steps, self._clock()

    def step(self, metrics: dict[str, Any]) -> None:
        step, loss = metrics["step"], f"loss {metrics['loss']:.4f}"
        validation = f", validation {self._task.headline(metrics['validation'])}" if "validation" in metrics else ""
        if step == self._first:
            self._first_ended = self._clock()
            self._console.print(f"the first step took {self._first_ended - self._began:.1f} s, {loss}")
        figures, left = f"{loss}, {_figures(metrics)}", self._left(step)
        if self._bar is not None:
            self._validation = validation or self._validation  # the bar keeps the last one in sight
            self._bar.figures = figures + self._validation
            self._bar.update(self._bar.task_ids[0], completed=step, description=left)
        elif step in (self._last, self._first + _EARLY) or step % _LINE_EVERY == 0 or validation:
            self._console.print(f"step {step:4d}/{self._last}  {figures}{left and f', {left}'}{validation}")

    def _left(self, step: int) -> str:
        """Return the time left, if the rest of the steps is as fast as those of this start; "" after the last.

        The first step, which is mostly slower, counts as long as it is the only one.
        """
        if step == self._last:
            return ""
        began, steps = (self._began, 1) if step == self._first else (self._first_ended, step - self._first)
        return f"{duration((self._clock() - began) / steps * (self._last - step))} left"

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_note(self, line: str) -> None:
        self._console.print(line)

    def show_folder(self, folder: Path) -> None:
        self._console.print(f"run folder: {folder}")

    def show_audit(self, outcome: Outcome) -> None:
        self._console.print(str(outcome))

    def show_data(self, line: str) -> None:
        self._console.print(printable(f"data: {line}"), highlight=False, soft_wrap=True)

    def show_plan(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def show_stop(self, signal: str, step: int, how_to_resume: str, *, finished: bool) -> None:
        stopped = f"stopped after step {step}, which has a checkpoint{how_to_resume}"
        self._console.print(f"{signal}: {'the run was finished' if finished else stopped}")

    def show_checkpoint(self, step: int) -> None:
        self._console.print(f"a checkpoint was requested: step {step} has one")

    def report(self, folder: RunFolder, task: Task) -> None:
        report = folder.report()
        title, columns, rows = task.table(report)
        table = Table(title=title, show_header=any(columns))
        for place, column in enumerate(columns):
            table.add_column(column, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
        self._console.print(
            f"trained for {duration(report['seconds'])}; the report is {folder.path / 'report.html'}, with pictures, "
            f"weights and checkpoint beside it"
        )
        config, run = read_config(folder.path), shlex.quote(str(folder.path.absolute()))
        search, again = f"search {run} 'a few words'", f"evaluate {run} {shlex.quote(config.data)}"
        self._console.print(f"next: {command_line(search if config.task == 'retrieve' else again)}")


def _figures(metrics: dict[str, Any]) -> str:
    """Return the figures of a step in a few words: gradient, temperature, speed, memory, time.

    >>> _figures({"grad_norm": 0.5, "logit_scale": 14.3, "examples_per_second": 3810.2, "seconds": 75})
    'grad norm 0.5, logit scale 14.3, 3,810 examples/s, 75 s'
    """
    found = [f"grad norm {metrics['grad_norm']:.3g}"]
    if "logit_scale" in metrics:
        found.append(f"logit scale {metrics['logit_scale']:.3g}")
    found.append(f"{metrics['examples_per_second']:,.0f} examples/s")
    for key, where in (("peak_cuda_bytes", " on the GPU"), ("peak_rss_bytes", "")):
        if key in metrics:
            found.append(f"{amount(metrics[key])}{where}")
    return ", ".join([*found, duration(metrics["seconds"])])
