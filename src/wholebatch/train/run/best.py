"""The best validation of a run, and the end of a run that has had none better for long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..tasks.task import Task

FILE = "best.safetensors"


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
        for metrics in earlier:
            self.is_beaten_by(metrics)

    def is_beaten_by(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the validation of this step, if it has one, is the best so far."""
        if not metrics.get("validation"):
            return False
        figure, step = self._task.headline_figure(metrics["validation"]), metrics["step"]
        better = figure > self.figure
        if better:
            self.step, self.figure = step, figure
        if step > self._since:
            self._without = 0 if better else self._without + 1
        return better

    @property
    def is_over(self) -> bool:
        """Whether patience has ended."""
        return 0 < self._patience <= self._without

    def remark(self, done: int, *, is_kept: bool) -> str:
        """Return a line about a run of `done` steps that has not become better for a third of them, else "".

        Args:
            done: steps that were made.
            is_kept: the best weights are in a file.
        """
        if not self.step or 3 * (done - self.step) < done:
            return ""
        advice = f"its weights are in {FILE}" if is_kept else "--patience 3 keeps its weights, and ends such a run"
        return f"note: the best validation was after step {self.step:,} of {done:,}; {advice}"
