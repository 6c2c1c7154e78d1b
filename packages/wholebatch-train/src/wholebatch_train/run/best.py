"""The best validation of a run, a warning of one that learns by heart, and the end of one without a better for long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

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
            self.is_beaten_by(metrics)

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
        """Whether patience has ended."""
        return 0 < self._patience <= self._without

    def warning(self, *, is_kept: bool) -> str:
        """Return a line, once, about a run that learns by heart while it can still be ended, else "".

        That is a run whose training loss falls though no validation has been better for a while, and the last is worse.

        Args:
            is_kept: the best weights are in a file.
        """
        if self._is_said or self._without < _WHILE or self._figure >= self.figure or self._loss >= self._loss_of_best:
            return ""
        self._is_said = True
        return (
            f"note: the run learns by heart: since step {self.step:,}, whose validation was the best, the training "
            f"loss has fallen from {self._loss_of_best:.3g} to {self._loss:.3g} and no validation was better; "
            "Ctrl-C ends it" + (f", and {FILE} has the weights of step {self.step:,}" if is_kept else "")
        )
