"""The processes that an audit starts, and what it knows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._processes import RankError, RankTimeoutError, pickled, run_processes
from .._user_error import UserError
from .compare import Gradients
from .measure import Answer, Facts, Job, Mistake, Quiet, Trial, run_trials
from .problem import INSTALLED, Factory

_PACKAGE = str(Path(__file__).parent.parent)
_AFTER_THE_STEP = Path(__file__).parent / "measure.py"


class FailureError(Exception):
    """The problem raised, or hung, on several ranks; the message says where."""

    def __init__(self, error: RankError | str) -> None:
        super().__init__(str(error))
        self.hangs = isinstance(error, RankTimeoutError)

    @property
    def summary(self) -> str:
        """What was raised first, and where; of ranks that hang, where each is."""
        if self.hangs:
            blocks = str(self).split("--- ")[1:]
            return "; ".join(f"{block.partition(' ')[0]} {block.split()[1]} {_place(block)}" for block in blocks)
        _, block = self._first()
        if "died silently" in block:
            return f"{block.splitlines()[-1].strip()} (in a script, calls stand under if __name__ == '__main__')"
        frames = [line.strip() for line in block.splitlines() if line.strip().startswith("File ")]
        if "UserError: " in block:
            return block.rpartition("UserError: ")[2].strip()
        frames = [frame for frame in frames if INSTALLED not in frame] or frames
        return f"{block.splitlines()[-1].strip()}{f' ({frames[-1]})' if frames else ''}"

    @property
    def rank(self) -> str:
        """Which it was that raised first."""
        return self._first()[0]

    def _first(self) -> tuple[str, str]:
        """A rank and its traceback: other ranks then lose their connection, and may be heard of first."""
        blocks = [block.partition(" failed:\n")[::2] for block in str(self).split("--- rank ")[1:]]
        blocks = [(rank, text.strip()) for rank, text in blocks if text.strip()] or [("", str(self))]
        return min(blocks, key=lambda block: "onnection" in block[1].splitlines()[-1])


def _place(block: str) -> str:
    """The innermost frame of the user's, of a stack whose innermost frame comes first."""
    frames = [line.strip() for line in block.splitlines() if line.strip().startswith("File ")]
    frames = [frame for frame in frames if "/torch/" not in frame]
    if not frames:
        return "has ended"
    if frames[0].startswith(f'File "{_AFTER_THE_STEP}"'):
        return "is done with its step"
    return f"is at {next((frame for frame in frames if _PACKAGE not in frame), frames[0])}"


@dataclass(frozen=True)
class Measured:
    """One trial with a gradient: every rank's answer."""

    trial: Trial
    answers: tuple[Answer, ...]

    @property
    def ranks(self) -> int:
        """W."""
        return len(self.answers)

    @property
    def gradients(self) -> Gradients:
        """As the optimizer finds them."""
        return self.answers[0].gradients

    @property
    def losses(self) -> list[float]:
        """Each rank's value."""
        return [answer.loss for answer in self.answers]

    @property
    def facts(self) -> Facts:
        """About the problem."""
        facts = self.answers[0].facts
        assert facts is not None
        return facts

    @property
    def counted(self) -> float:
        """How much each rank's loss counts: an engine averages or adds."""
        return 1.0 if self.facts.engine == "sum" else 1 / self.ranks

    @property
    def mean(self) -> float:
        """The loss whose gradient the engine makes of the ranks'."""
        return self.counted * sum(self.losses)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """By all rows of the batch, as the engine's averaging makes it count."""
        factor = 1 / self.ranks if self.facts.engine in ("mean", "ddp") else 1.0
        return {name: factor * torch.cat([a.inputs[name] for a in self.answers]) for name in self.answers[0].inputs}


@dataclass(frozen=True)
class Runs:
    """Starts processes for one problem; none outlives a call."""

    factory: Factory | str
    dtype: torch.dtype
    seed: int
    timeout_s: float
    inputs: bool = True  # whether the batch's tensors may be leaves with a gradient

    def answers(
        self,
        trials: Sequence[Trial],
        directions: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> list[tuple[Answer, ...]]:
        """Each trial's answers, all on as many ranks as the first one has counts.

        Raises:
            UserError: if the problem is none.
            FailureError: if it raises or hangs.
        """
        trials = [replace(trial, inputs=trial.inputs and self.inputs) for trial in trials]
        try:
            factory = self.factory if isinstance(self.factory, str) else pickled(self.factory)
            job = Job(factory, tuple(trials), self.dtype, self.seed, directions or {})
            of_ranks: list[Any] = run_processes(
                run_trials, len(trials[0].counts), job, timeout_s=self.timeout_s, backend="gloo"
            )
        except RankError as error:
            raise FailureError(error) from error
        except ValueError as error:  # what cannot travel to another process
            raise UserError(f"the problem's factory must be a function of a module: {error}") from None
        for of_rank in of_ranks:
            if isinstance(of_rank, Mistake):
                if len(of_ranks) == 1:
                    raise UserError(of_rank.message)
                raise FailureError(of_rank.message)
        return [*zip(*of_ranks, strict=True)]

    def measure(self, trials: Sequence[Trial]) -> list[Measured]:
        """Trials with a gradient."""
        return [Measured(t, of_ranks) for t, of_ranks in zip(trials, self.answers(trials), strict=True)]


@dataclass(frozen=True)
class Truth:
    """What one process finds for the whole batch, and how others are compared with it.

    Args:
        own: of the problem's own loss or step.
        reference: the truth: the same, or of the problem's reference.
        groups: of parameters.
        directions: of each group, for differences.
        total: norm of the true gradient.
        tolerance: of relative errors.
        step: of differences; None if the loss is not smooth enough for any.
        quiet: modules in evaluation mode on several ranks, for what they draw differs between ranks.
        close: relative error of differences.
        detached: the gradient is not that of the loss's value, so that differences say nothing about it.
    """

    local: Measured
    reference: Measured
    groups: Mapping[str, Sequence[str]]
    directions: Mapping[str, Mapping[str, Tensor]]
    total: float
    tolerance: float
    step: float | None
    quiet: tuple[Quiet, ...]
    close: float
    detached: bool = False

    @property
    def scalars(self) -> list[str]:
        """Groups of one number: temperatures, biases."""
        return [g for g, names in self.groups.items() if sum(self.reference.gradients[n].numel() for n in names) == 1]

    @property
    def encoders(self) -> list[str]:
        """The other groups."""
        return [group for group in self.groups if group not in self.scalars]
