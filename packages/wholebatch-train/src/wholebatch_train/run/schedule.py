"""The learning rate of a step: a linear warm-up and a cosine, which an extension of the run continues to more steps.

This module imports no torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Extension(NamedTuple):
    """A decision, after `at` steps, to train until step `steps`."""

    at: int
    steps: int


class Schedule(NamedTuple):
    """The factor of the learning rate over the steps of a run.

    Args:
        planned_steps: the steps of the run's configuration.
        warmup_steps: steps of linear warm-up, at the start and after each extension, there at most half of its steps.
        extensions: the extensions of the run, in order.
    """

    planned_steps: int
    warmup_steps: int
    extensions: tuple[Extension, ...] = ()

    @property
    def steps(self) -> int:
        """The steps of the run, extensions included."""
        return self.extensions[-1].steps if self.extensions else self.planned_steps

    def rate(self, peak: float, step: int) -> float:
        """Return the learning rate of a step, counted from 0, whose largest value is `peak`.

        An extension at step A to N steps takes the cosine of N steps from there on, and reaches it from the rate that
        the run would have had at A, along a line of `warmup_steps` steps, or of half the steps that are left.

        >>> [round(Schedule(4, 2).rate(1.0, step), 3) for step in range(4)]
        [0.5, 0.854, 0.5, 0.146]
        >>> [round(Schedule(4, 2, (Extension(4, 8),)).rate(1.0, step), 3) for step in range(4, 8)]
        [0.25, 0.309, 0.146, 0.038]
        """
        if not self.extensions:
            warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
            cosine = (1 + math.cos(math.pi * step / self.planned_steps)) / 2
            return peak * warmup * cosine
        start, steps = self.extensions[-1]
        earlier = self._replace(extensions=self.extensions[:-1])
        if step < start:
            return earlier.rate(peak, step)
        before, after = earlier.rate(peak, start), Schedule(steps, self.warmup_steps).rate(peak, step)
        line = _steps_of_line(start, steps, self.warmup_steps)
        return before + min(1.0, (step - start + 1) / line) * (after - before)

    def extended(self, start: int, steps: int) -> Schedule:
        """Return the schedule of the run if, after `start` steps, it is to train until step `steps`.

        An earlier extension at the same step, after which nothing was trained, is replaced.
        """
        if steps == self.steps:
            return self
        kept = self._replace(extensions=tuple(each for each in self.extensions if each.at < start))
        return kept if steps == kept.steps else kept._replace(extensions=(*kept.extensions, Extension(start, steps)))


def describe_extension(step: int, steps: int, warmup_steps: int) -> str:
    """Return a line that states the learning rate of an extended run.

    >>> describe_extension(300, 600, 20)
    'extended at step 300 to 600: the learning rate goes on along the cosine of 600 steps, reached over 20 steps'
    """
    line = _steps_of_line(step, steps, warmup_steps)
    return (
        f"extended at step {step} to {steps}: the learning rate goes on along the cosine of {steps} steps, reached "
        f"over {line} step{'s' if line > 1 else ''}"
    )


def _steps_of_line(start: int, steps: int, warmup_steps: int) -> int:
    """Return over how many steps an extended run reaches its cosine: so few that it is reached before the end."""
    return max(1, min(warmup_steps, (steps - start) // 2))
