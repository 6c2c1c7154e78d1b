"""The output of a run: a line every few steps, and the figures of the report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from wholebatch.app import amount, duration, printable

from .config import TrainConfig
from .run.resume import command_line
from .tasks.task import Task
from .using.output import show_table

_LINE_EVERY = 10  # steps between two plain lines
_EARLY = 2  # steps after the first one of a start, by which the time left can be estimated


class Progress:
    """A line every few steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_quiet: bool = False) -> None:
        self._clock = clock
        # markup and emoji: a path is shown as it is
        self._console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False, quiet=is_quiet)
        self._began, self._first_ended = 0.0, 0.0
        self._first, self._last = 0, 0  # steps

    def say(self, line: str) -> None:
        self._console.print(line)

    def say_of_data(self, line: str) -> None:
        """Print a choice that the data have made; the line may hold texts of theirs."""
        self.say(printable(f"data: {line}"))

    def start(self, config: TrainConfig, task: Task, *, size: int, done: int, steps: int) -> None:
        """Training begins after `done` earlier steps, and is to make `steps` in all."""
        self._task = task
        self.say(
            f"{task.describe()}\n"
            f"global batch {config.batch_size:,} on {size} process{'es' if size > 1 else ''}"
            + (f", resuming after step {done}" if done else "")
            + (", starting again: there was no checkpoint yet" if config.resume is not None and not done else "")
        )
        self._first, self._last, self._began = done + 1, steps, self._clock()

    def step(self, metrics: dict[str, Any]) -> None:
        """A step is complete."""
        step, loss = metrics["step"], f"loss {metrics['loss']:.4f}"
        validation = f", validation {self._task.headline(metrics['validation'])}" if "validation" in metrics else ""
        if step == self._first:
            self._first_ended = self._clock()
            self.say(f"the first step took {self._first_ended - self._began:.1f} s, {loss}")
        if step in (self._last, self._first + _EARLY) or step % _LINE_EVERY == 0 or validation:
            left = self._time_left(step)
            self.say(f"step {step:4d}/{self._last}  {loss}, {_figures(metrics)}{left and f', {left}'}{validation}")

    def _time_left(self, step: int) -> str:
        """Return the time left, if the rest of the steps is as fast as those of this start; "" after the last.

        The first step, which is mostly slower, counts as long as it is the only one.
        """
        if step == self._last:
            return ""
        began, steps = (self._began, 1) if step == self._first else (self._first_ended, step - self._first)
        return f"{duration((self._clock() - began) / steps * (self._last - step))} left"

    def report(self, folder: Path, config: TrainConfig, task: Task, report: dict[str, Any]) -> None:
        title, columns, rows = task.table(report)
        show_table(columns, rows, title)
        self.say(
            f"trained for {duration(report['seconds'])}; the report is {folder / 'report.html'}, with weights and "
            "checkpoint beside it"
        )
        run = shlex.quote(str(folder.absolute()))
        search, again = f"search {run} 'a few words'", f"evaluate {run} {shlex.quote(config.data)}"
        self.say(f"next: {command_line(search if config.task == 'retrieve' else again)}")


def _figures(metrics: dict[str, Any]) -> str:
    """Return the figures of a step in a few words: gradient, temperature, speed, memory, time.

    >>> _figures({"grad_norm": 0.5, "logit_scale": 14.3, "examples_per_second": 3810.2, "seconds": 75})
    'grad norm 0.5, logit scale 14.3, 3,810 examples/s, 75 s'
    """
    figures = [f"grad norm {metrics['grad_norm']:.3g}"]
    if "logit_scale" in metrics:
        figures.append(f"logit scale {metrics['logit_scale']:.3g}")
    figures.append(f"{metrics['examples_per_second']:,.0f} examples/s")
    for key, where in (("peak_cuda_bytes", " on the GPU"), ("peak_rss_bytes", "")):
        if key in metrics:
            figures.append(f"{amount(metrics[key])}{where}")
    return ", ".join([*figures, duration(metrics["seconds"])])
