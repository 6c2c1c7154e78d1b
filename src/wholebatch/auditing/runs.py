"""Run trials on processes, and read their answers and failures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._base.user_error import UserError
from .._launch.processes import RankError, RankProcesses, RankTimeoutError, pickled
from .compare import Comparison, Gradients, compare, same
from .factory import INSTALLED, Factory
from .measure import Answer, EvalModules, Facts, Job, Trial, run_trials

_Probe = TypeVar("_Probe", bound=Callable[..., Any])
_PACKAGE = str(Path(__file__).parent.parent)
_AFTER_THE_STEP = tuple(f'File "{Path(__file__).parent / name}"' for name in ("measure.py", "engine.py"))


def failure_summary(error: RankError) -> str:
    """Return the first error and its place; if ranks hang, the place of each."""
    if isinstance(error, RankTimeoutError):
        blocks = str(error).split("--- ")[1:]
        return "; ".join(f"{block.partition(' ')[0]} {block.split()[1]} {_place(block)}" for block in blocks)
    _, block = first_failure(error)
    if "died silently" in block:
        return f"{block.splitlines()[-1].strip()} (in a script, put calls under if __name__ == '__main__')"
    frames = [line.strip() for line in block.splitlines() if line.strip().startswith("File ")]
    if "UserError: " in block:
        return block.rpartition("UserError: ")[2].strip()
    frames = [frame for frame in frames if INSTALLED not in frame] or frames
    return f"{block.splitlines()[-1].strip()}{f' ({frames[-1]})' if frames else ''}"


def first_failure(error: RankError) -> tuple[str, str]:
    """Return the first failed rank and its traceback; other ranks then lose their connection, and come last."""
    blocks = [block.partition(" failed:\n")[::2] for block in str(error).split("--- rank ")[1:]]
    failures = [(rank, text.strip()) for rank, text in blocks if text.strip()]
    return min(failures, key=lambda failure: "onnection" in failure[1].splitlines()[-1])


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
    """Every rank's answer to one trial."""

    trial: Trial
    answers: Sequence[Answer]

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

    def passes(self, names: Iterable[str]) -> int:
        """Return the number of backward passes that reached these parameters; 1 if it is not the same for all."""
        numbers = {answer.passes.get(name, 0) for answer in self.answers for name in names}
        return numbers.pop() if len(numbers) == 1 else 1

    @property
    def facts(self) -> Facts:
        """Return the facts about the problem."""
        return self.answers[0].facts

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


class Runs:
    """Measure one problem on any number of ranks, whose processes stay from one measurement to the next until `close`.

    Attributes:
        dtype: of the computation.
        inputs: whether the batch's tensors may be leaves with a gradient.
    """

    def __init__(self, factory: Factory | str, seed: int, timeout_s: float) -> None:
        try:
            self._factory = factory if isinstance(factory, str) else pickled(factory)
        except ValueError as error:
            raise UserError(f"the problem's factory must be a function of a module: {error}") from None
        self._seed, self._timeout_s = seed, timeout_s
        self._groups: dict[int, RankProcesses] = {}
        self.dtype, self.inputs = torch.float64, True

    def measure(self, trials: Sequence[Trial]) -> list[Measured]:
        """Return the outcomes of trials, all on as many ranks as the first one has counts.

        Raises:
            UserError: if the problem is invalid.
            RankError: if it raises or hangs.
        """
        job = Job(self._factory, tuple(trials), self.dtype, self._seed, self.inputs)
        rank_results: list[Any] = self._group(len(trials[0].counts)).call(run_trials, job)
        if isinstance(rank_results[0], str):
            raise UserError(rank_results[0])
        return [Measured(trial, answers) for trial, *answers in zip(trials, *rank_results, strict=True)]

    def close(self) -> None:
        """End all processes."""
        for group in self._groups.values():
            group.close()

    def _group(self, size: int) -> RankProcesses:
        """Return the processes of that many ranks; those of one rank stay beside them, and no others."""
        if size not in self._groups:
            for other in [n for n in self._groups if n > 1 and size > 1]:
                self._groups.pop(other).close()
            self._groups[size] = RankProcesses(size, timeout_s=self._timeout_s)
        return self._groups[size]


@dataclass(frozen=True)
class Baseline:
    """The gradient of one process on the whole batch, with which others are compared."""

    runs: Runs  # measure the problem on other rows, or other ranks
    measured: Measured  # the problem's loss or step on one process
    reference: Measured  # the problem's reference on one process; its loss or step if it has none
    groups: Mapping[str, Sequence[str]]  # the names of each group's parameters
    directions: Mapping[str, Mapping[str, Tensor]]  # of each group, for finite differences
    total: float  # norm of the true gradient
    tolerance: float  # of relative errors
    eval_modules: tuple[EvalModules, ...]  # in evaluation mode on several ranks, which would draw different numbers
    close: float  # relative error of finite differences
    step: float | None = None  # of finite differences; None if the loss is not smooth enough for any
    slopes: Mapping[str, float] = field(default_factory=dict)  # differences along the directions, if there is a step
    # detached: on one process the gradient is not that of the loss's value, and finite differences are no check of it
    detached: bool = False

    @property
    def facts(self) -> Facts:
        """Return the facts about the problem."""
        return self.measured.facts

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

    def compare_together(self, got: Gradients, true: Gradients, groups: Iterable[str]) -> Comparison:
        """Compare the gradients of all parameters of some groups."""
        return compare(got, true, [name for group in groups for name in self.groups[group]], self.total)

    def again(self, measured: Measured, **changes: Any) -> Measured:
        """Return the outcome of a trial with some of its settings changed."""
        return self.runs.measure([replace(measured.trial, **changes)])[0]


def probe(function: _Probe) -> _Probe:
    """Have a function that looks for a cause by further trials return None where one of them fails."""

    @functools.wraps(function)
    def probed(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RankError, UserError):
            return None

    return probed  # type: ignore[return-value]  # the same, and None
