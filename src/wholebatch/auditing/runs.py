"""Run trials on new processes, and read their answers and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.user_error import UserError
from .._launch.processes import RankError, RankTimeoutError, pickled, run_processes
from .compare import Comparison, Gradients, compare, same
from .factory import INSTALLED, Factory
from .measure import run_trials
from .trial import Answer, EvalModules, Facts, Job, Trial

_PACKAGE = str(Path(__file__).parent.parent)
_AFTER_THE_STEP = tuple(f'File "{Path(__file__).parent / name}"' for name in ("measure.py", "engine.py"))


class FailureError(Exception):
    """The problem raised or hung on several ranks; the message says where."""

    def __init__(self, error: RankError | str) -> None:
        super().__init__(str(error))
        self.hangs = isinstance(error, RankTimeoutError)

    @property
    def summary(self) -> str:
        """Return the first error and its place; if ranks hang, the place of each."""
        if self.hangs:
            blocks = str(self).split("--- ")[1:]
            return "; ".join(f"{block.partition(' ')[0]} {block.split()[1]} {_place(block)}" for block in blocks)
        _, block = self._first()
        if "died silently" in block:
            return f"{block.splitlines()[-1].strip()} (in a script, put calls under if __name__ == '__main__')"
        frames = [line.strip() for line in block.splitlines() if line.strip().startswith("File ")]
        if "UserError: " in block:
            return block.rpartition("UserError: ")[2].strip()
        frames = [frame for frame in frames if INSTALLED not in frame] or frames
        return f"{block.splitlines()[-1].strip()}{f' ({frames[-1]})' if frames else ''}"

    @property
    def rank(self) -> str:
        """Return the rank that raised first."""
        return self._first()[0]

    def _first(self) -> tuple[str, str]:
        """Return the first failed rank and its traceback; other ranks then lose their connection, and come last."""
        blocks = [block.partition(" failed:\n")[::2] for block in str(self).split("--- rank ")[1:]]
        blocks = [(rank, text.strip()) for rank, text in blocks if text.strip()] or [("", str(self))]
        return min(blocks, key=lambda block: "onnection" in block[1].splitlines()[-1])


def _place(block: str) -> str:
    """Return the innermost frame of the user's code, from a stack whose innermost frame comes first."""
    frames = [line.strip() for line in block.splitlines() if line.strip().startswith("File ")]
    frames = [frame for frame in frames if "/torch/" not in frame]
    if not frames:
        return "has ended"
    if frames[0].startswith(_AFTER_THE_STEP):
        return "is done with its step"
    return f"is at {next((frame for frame in frames if _PACKAGE not in frame), frames[0])}"


@dataclass(frozen=True)
class Measured:
    """Every rank's answer to one trial with a gradient."""

    trial: Trial
    answers: tuple[Answer, ...]

    @property
    def ranks(self) -> int:
        """Return the number of ranks, W."""
        return len(self.answers)

    @property
    def gradients(self) -> Gradients:
        """Return rank 0's gradients, as the optimizer finds them."""
        return self.answers[0].gradients

    @property
    def losses(self) -> list[float]:
        """Return the value of each rank's loss."""
        return [answer.loss for answer in self.answers]

    @property
    def replicated(self) -> bool:
        """Return whether all ranks have the same loss."""
        return all(same(loss, self.losses[0]) for loss in self.losses)

    @property
    def facts(self) -> Facts:
        """Return the facts about the problem."""
        facts = self.answers[0].facts
        assert facts is not None
        return facts

    @property
    def loss_weight(self) -> float:
        """Return the weight of each rank's loss: 1 if the engine adds, 1/W if it averages."""
        return 1.0 if self.facts.engine == "sum" else 1 / self.ranks

    @property
    def mean(self) -> float:
        """Return the weighted sum of the ranks' losses, the loss whose gradient the engine produces."""
        return self.loss_weight * sum(self.losses)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the gradients by all rows of the batch, weighted as the engine averages."""
        factor = 1 / self.ranks if self.facts.engine in ("mean", "ddp") else 1.0
        return {name: factor * torch.cat([a.inputs[name] for a in self.answers]) for name in self.answers[0].inputs}


@dataclass(frozen=True)
class Runs:
    """Start processes for one problem; none outlives a call."""

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
        """Return each trial's answers; all trials run on as many ranks as the first one has counts.

        Raises:
            UserError: if the problem is invalid.
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
        except ValueError as error:  # it cannot be pickled
            raise UserError(f"the problem's factory must be a function of a module: {error}") from None
        for of_rank in of_ranks:
            if isinstance(of_rank, str):
                raise UserError(of_rank) if len(of_ranks) == 1 else FailureError(of_rank)
        return [*zip(*of_ranks, strict=True)]

    def measure(self, trials: Sequence[Trial]) -> list[Measured]:
        """Return the outcomes of trials with a gradient."""
        return [Measured(t, of_ranks) for t, of_ranks in zip(trials, self.answers(trials), strict=True)]


@dataclass(frozen=True)
class Baseline:
    """The gradient of one process on the whole batch, with which others are compared.

    Args:
        measured: the problem's loss or step on one process.
        reference: the problem's reference on one process; `measured` if it has none.
        groups: the names of each group's parameters.
        directions: of each group, for finite differences.
        total: norm of the true gradient.
        tolerance: of relative errors.
        step: of finite differences; None if the loss is not smooth enough for any.
        eval_modules: modules in evaluation mode on several ranks, because ranks would draw different random numbers.
        close: relative error of finite differences.
        detached: whether the gradient on one process differs from that of the loss's value; then finite differences
            are no check of it.
    """

    measured: Measured
    reference: Measured
    groups: Mapping[str, Sequence[str]]
    directions: Mapping[str, Mapping[str, Tensor]]
    total: float
    tolerance: float
    step: float | None
    eval_modules: tuple[EvalModules, ...]
    close: float
    detached: bool = False

    @property
    def scalars(self) -> list[str]:
        """Return the groups of one number: temperatures, biases."""
        return [g for g, names in self.groups.items() if sum(self.reference.gradients[n].numel() for n in names) == 1]

    @property
    def encoders(self) -> list[str]:
        """Return the groups of more than one number."""
        return [group for group in self.groups if group not in self.scalars]

    def compare(self, got: Gradients, true: Gradients | None = None) -> dict[str, Comparison]:
        """Compare each group's gradient with the true one, the reference's by default."""
        true = self.reference.gradients if true is None else true
        return {group: compare(got, true, names, self.total) for group, names in self.groups.items()}
