"""The audit: one process, then several, then what explains the difference."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .._settings import shown
from .._user_error import UserError
from ..partition import Partition
from . import causes, multi_rank, one_process
from .compare import Comparison, compare, directions, grouped, norm, number, same
from .differences import CLOSE, smooth_step
from .measure import Facts, Quiet, Trial
from .problem import checked_factory, unheard
from .report import Finding, Report, Row
from .runs import FailureError, Measured, Runs, Truth

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
_MOST_SECONDS = 1e9
_WHOLE = Trial((-1,), ())  # all rows, on one rank


def audit(
    problem: Any,
    world_sizes: Sequence[int] = (1, 2, 3),
    *,
    tolerance: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    diagnose: bool = True,
    timeout_s: float = 120,
    name: str | None = None,
) -> Report:
    r"""Compare the gradient that W ranks end with with that of one process on the whole batch, and say why it differs.

    ratio = <g, t> / <t, t>,   cosine = <g, t> / |g| |t|,   relative error = |g - t| / |t|;   g: W ranks', t: one's

    The problem is run on real processes (gloo, CPU), with the batch split evenly and, if the problem says that it is
    made for that, unevenly, its gradients reduced as its engine would; all that is in float64. On one process the
    gradient is compared with the reference, or with differences of the returned loss. Where a gradient is wrong,
    further runs find out why (see `docs/audit.md`). No process outlives the call.

    Args:
        problem: a function that returns a :class:`wholebatch.Problem`, or (model, batch, loss); or its name,
            "module:function". It is called on every rank, many times, always after the same seeds.
        world_sizes: numbers of ranks W. The batch should have a multiple of each; if it has not, and the problem is not
            `uneven`, its last rows are left out.
        tolerance: of the relative error; None: 1e-5 in float64, 1e-3 in float32.
        dtype: torch.float64 or torch.float32. Where the model cannot be run in float64, it is run in float32, and a
            note says so.
        seed: of everything that draws random numbers.
        diagnose: whether causes are looked for.
        timeout_s: for each group of processes.
        name: of the problem in the report.

    Returns:
        :class:`wholebatch.auditing.Report`: print it; `exact` is the verdict, `causes` are the causes' names.

    Raises:
        ValueError: if the problem is not what it should be, raises on one process, or is not deterministic there.

    >>> import wholebatch as wb
    >>> report = wb.audit("my_project.audits:clip", world_sizes=(1, 2))  # doctest: +SKIP
    >>> assert report.exact, report  # doctest: +SKIP
    """
    started = time.monotonic()
    _check(world_sizes, dtype, tolerance, timeout_s, seed)
    if not isinstance(diagnose, bool):
        raise UserError(f"diagnose must be True or False, got {shown(diagnose)}")
    if name is not None and not isinstance(name, str):
        raise UserError(f"name must be a string, got {shown(name)}")
    world_sizes = tuple(dict.fromkeys(world_sizes))
    with unheard():
        checked_factory(problem)
    runs, local, reference, notes = _first_run(problem, dtype, seed, timeout_s)
    facts = local.facts
    truth, more = _truth(runs, facts, local, reference, world_sizes, tolerance or _TOLERANCES[runs.dtype])
    notes += more
    made = _Audit(runs, facts, truth, diagnose=diagnose)
    made.one_process()
    for size in world_sizes:
        if size > 1 and not made.hangs:  # for it would again, for as long
            made.several(size)
    return Report(
        name or str(problem if isinstance(problem, str) else getattr(problem, "__name__", "problem")),
        tuple(made.rows),
        tuple(_each_once(sorted(made.findings, key=lambda finding: not finding.cause.wrong))),
        tuple(dict.fromkeys(notes + made.notes)),
        made.values,
        str(runs.dtype).removeprefix("torch."),
        truth.tolerance,
        time.monotonic() - started,
        _versions(),
    )


def _check(
    world_sizes: Sequence[int], dtype: torch.dtype, tolerance: float | None, timeout_s: float, seed: int
) -> None:
    sizes = list(world_sizes) if isinstance(world_sizes, list | tuple | range) else []
    if not sizes or any(type(size) is not int or not 1 <= size <= 64 for size in sizes):
        raise UserError(f"world_sizes must be numbers of ranks from 1 to 64, as in (1, 2, 3); got {shown(world_sizes)}")
    if not isinstance(dtype, torch.dtype) or dtype not in _TOLERANCES:
        raise UserError(f"dtype must be torch.float64 or torch.float32, got {shown(dtype)}")
    if tolerance is not None and not (isinstance(tolerance, float) and 0 < tolerance < 1):
        raise UserError(f"tolerance must be a relative error between 0 and 1, got {shown(tolerance)}")
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s < _MOST_SECONDS:
        raise UserError(f"timeout_s must be a positive number of seconds, got {shown(timeout_s)}")
    if type(seed) is not int or not 0 <= seed < 2**32 - 2000:
        raise UserError(f"seed must be an integer from 0 on, got {shown(seed)}")


def _first_run(
    problem: Any, dtype: torch.dtype, seed: int, timeout_s: float
) -> tuple[Runs, Measured, Measured, list[str]]:
    """The way in which the problem can be run on one process, twice, with the same outcome; and that of its reference.

    Raises:
        UserError: if there is none.
    """
    first: FailureError | None = None
    for of in dict.fromkeys((dtype, torch.float32)):
        for inputs in (True, False):
            runs = Runs(problem, of, seed, timeout_s, inputs)
            try:
                one, other, reference = runs.measure([_WHOLE, _WHOLE, replace(_WHOLE, reference=True)])
            except FailureError as failure:
                first = first or failure
                continue
            _check_deterministic(one, other)
            answer = one.answers[0]
            notes = []
            if of != dtype:
                notes.append(f"computed in float32: in float64 it raises {first.summary if first else ''}")
            elif not inputs:
                notes.append(f"no gradients by the batch: with them it raises {first.summary if first else ''}")
            if answer.said:
                notes.append(
                    f"what the problem prints is left out ({answer.said.strip().partition(chr(10))[0]!r}, ...)"
                )
            return runs, one, reference, notes
        if not _is_about_dtypes(first):
            break
    raise UserError(f"on one process the problem failed: {first.summary if first else ''}") from first


def _is_about_dtypes(failure: FailureError | None) -> bool:
    return any(word in str(failure) for word in ("dtype", "Double", "float64", "scalar type"))


def _check_deterministic(one: Measured, other: Measured) -> None:
    differ = [
        name for name, x in one.gradients.items() if not torch.allclose(x, other.gradients[name], rtol=1e-9, atol=0)
    ]
    if one.losses != other.losses or differ:
        what = f"losses {one.losses[0]!r} and {other.losses[0]!r}"
        raise UserError(
            f"two runs of one process differ ({what}), though both began with the same seeds: data and weights must "
            "come from torch's, numpy's or random's own generator, or from one with a seed; and each call of the "
            "factory must make its own model"
        )


def _truth(
    runs: Runs, facts: Facts, local: Measured, reference: Measured, world_sizes: Sequence[int], tolerance: float
) -> tuple[Truth, list[str]]:
    """What one process finds, for the rows that all splits have."""
    notes, rows = [], facts.rows
    if not facts.uneven:
        multiple = math.lcm(*world_sizes)
        rows -= rows % multiple
        if not rows:
            raise UserError(
                f"a batch of {facts.rows} rows cannot be split evenly over {_listed(world_sizes)} ranks: give it a "
                f"multiple of {multiple} rows, or uneven=True where ranks may have different numbers"
            )
        if rows != facts.rows:
            notes.append(f"the first {rows} of {facts.rows} rows, which can be split evenly over all numbers of ranks")
    elif rows < max(world_sizes):
        raise UserError(f"a batch of {rows} rows cannot be split over {max(world_sizes)} ranks: give it more rows")
    whole = Trial((rows,), tuple(range(rows)))
    if rows == facts.rows:
        local, reference = replace(local, trial=whole), replace(reference, trial=replace(whole, reference=True))
    else:
        local, reference = runs.measure([whole, replace(whole, reference=True)])
    total = norm(reference.gradients)
    if not total or not math.isfinite(total):
        raise UserError(
            f"on one process the norm of the whole gradient is {total}: there is nothing to compare. Does the step end "
            "with zero_grad(), is everything detached, or is the loss constant, as with one row?"
        )
    groups = grouped(reference.gradients)
    quiet: tuple[Quiet, ...] = ()
    if local.answers[0].drew and max(world_sizes) > 1:
        quiet = _quiet(runs, whole)
        modules = "its dropout modules" if quiet == ("dropout",) else "the model"
        notes.append(f"on several ranks with {modules} in evaluation mode, for ranks draw different random numbers")
    made = directions(reference.gradients, groups)
    return Truth(local, reference, groups, made, total, tolerance, None, quiet, CLOSE[runs.dtype]), notes


def _quiet(runs: Runs, whole: Trial) -> tuple[Quiet, ...]:
    """Which modules have to be in evaluation mode for nothing to be drawn."""
    choices: tuple[tuple[Quiet, ...], ...] = (("dropout",), ("all",))
    for quiet in choices:
        (measured,) = runs.measure([Trial(whole.counts, whole.rows, quiet=quiet)])
        if not measured.answers[0].drew:
            return quiet
    raise UserError(
        "the forward pass draws random numbers, in evaluation mode, too, and ranks draw others than one process: make "
        "them part of the batch, or audit with world_sizes=(1,) alone"
    )


class _Audit:
    """Rows and findings, split by split."""

    def __init__(self, runs: Runs, facts: Facts, truth: Truth, *, diagnose: bool) -> None:
        self.runs, self.facts, self.truth, self.diagnose = runs, facts, truth, diagnose
        self.rows: list[Row] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.values: dict[tuple[int, ...], tuple[float, ...]] = {}
        self.with_inputs = True
        self.hangs = False
        self.explained: set[tuple[bool, frozenset[str]]] = set()  # unequal parts or not, and which groups are wrong
        self.wrong_on_one = False
        self.by_differences: dict[str, float] | None = None  # the truth along directions, where one process is wrong

    def one_process(self) -> None:
        """The gradient of the returned loss, or of the reference."""
        truth, runs = self.truth, self.runs
        local, tolerance = truth.local, truth.tolerance
        counts = local.trial.counts
        self.values[counts] = (local.losses[0],)
        step: float | None = None
        close = truth.close
        found: dict[str, float] = {}
        try:
            step, found, close = smooth_step(runs, truth, local.trial)
        except FailureError as failure:
            self.notes.append(f"differences of the loss could not be taken: {failure.summary}")
        self.truth = truth = replace(truth, step=step, close=close)
        if self.facts.has_reference:
            compared = one_process.against_reference(truth)
        elif step is not None:
            compared, tolerance = one_process.against_differences(truth, local, found), close
        elif self.facts.calls_backward:
            compared = {}
            self.findings.append(Finding(causes.NOT_CHECKED, counts, (), "differences with several steps disagree"))
        else:
            self.notes.append("the loss is not smooth enough to check one process's gradient by differences")
            compared = {}
        found_here = one_process.diagnose(runs, truth, compared, tolerance, found) if self.diagnose else []
        if not any(finding.cause is causes.DETACHED for finding in found_here):
            right = self._add(counts, compared, tolerance)
            self.wrong_on_one = not right
            self.by_differences = None if right or self.facts.has_reference else found
        else:
            self.truth = truth = replace(truth, detached=True)
        self.findings += found_here
        if self.diagnose and not self.facts.has_reference:
            self._look_at_micro_batches()
        if self.facts.has_reference and any(row.kind == "input" and not row.exact for row in self._inputs(local)):
            self.with_inputs = False
            self.notes.append("inputs are left out: on one process their gradient is not the reference's")
        unused = [name for name in local.answers[0].missing if not truth.reference.gradients[name].count_nonzero()]
        if unused:
            self.findings.append(Finding(causes.UNUSED, counts, tuple(unused), "grad is None"))
        if truth.quiet:  # on several ranks nothing is drawn; neither is in what they are compared with
            trials = [
                Trial(m.trial.counts, m.trial.rows, m.trial.reference, truth.quiet) for m in (local, truth.reference)
            ]
            new_local, new_reference = runs.measure(trials)
            self.truth = replace(truth, local=new_local, reference=new_reference)

    def _look_at_micro_batches(self) -> None:
        """The loss of one process is taken for that of the whole batch; it may be a mean of several."""
        apart = one_process.micro_batches(self.runs, self.truth)
        if apart is not None:
            cause = replace(causes.MICRO_BATCHES, wrong=False)
            self.findings.append(Finding(cause, self.truth.local.trial.counts, (), apart))

    def several(self, size: int) -> None:
        """Equal parts, and those that the problem is made for."""
        rows = self.truth.local.trial.rows
        of_sizes = splits(len(rows), size, uneven=self.facts.uneven, empty=self.facts.empty)
        for measured in self._measured([Trial(counts, rows, quiet=self.truth.quiet) for counts in of_sizes]):
            counts = measured.trial.counts
            self.values[counts] = tuple(measured.losses)
            if self.by_differences is not None:
                compared = one_process.against_differences(self.truth, measured, self.by_differences)
                self._add(counts, compared, self.truth.close)
                self.notes.append(
                    "what is wrong on one process is wrong on several: causes there are looked for once it is mended"
                )
                continue
            compared = self._compared(measured)
            right = self._add(counts, compared, self.truth.tolerance)
            if self.with_inputs and self.facts.engine != "none":  # there only the step knows what a rank's rows get
                self.rows += self._inputs(measured)
            if right:
                self._look_at_values(measured)
            elif self.diagnose:
                self._explain(measured, compared)

    def _explain(self, measured: Measured, compared: dict[str, Comparison]) -> None:
        """Why, unless fewer ranks with the same symptoms have shown a particular cause."""
        verdicts = {group: c.verdict(self.truth.tolerance) for group, c in compared.items()}
        wrong = frozenset(group for group, verdict in verdicts.items() if verdict != "exact")
        if self.wrong_on_one and self._as_on_one(measured):
            self.notes.append("on several ranks the gradient is that of one process, which is wrong")
            return
        symptoms = (len(set(measured.trial.counts)) > 1, wrong)
        if symptoms in self.explained:
            return
        found = multi_rank.diagnose(self.runs, self.truth, measured, compared)
        self.findings += found
        if any(finding.cause.name not in causes.GENERAL for finding in found):
            self.explained.add(symptoms)

    def _as_on_one(self, measured: Measured) -> bool:
        one, total, tolerance = self.truth.local.gradients, self.truth.total, self.truth.tolerance
        every = self.truth.groups.values()
        return all(compare(measured.gradients, one, names, total).error <= tolerance for names in every)

    def _measured(self, trials: Sequence[Trial]) -> list[Measured]:
        """Of these trials the ones that end; for the others a finding."""
        try:
            return self.runs.measure(trials)
        except FailureError as failure:
            self.hangs = failure.hangs
            if len(trials) > 1 and not failure.hangs:  # one of them: which
                return [measured for trial in trials for measured in self._measured([trial])]
            cause, of = (causes.HANGS, "") if failure.hangs else (causes.RAISES, failure.rank)
            evidence = f"rank {of}: {failure.summary}" if of else failure.summary
            self.findings.append(Finding(cause, trials[0].counts, (), evidence))
            return []

    def _compared(self, measured: Measured) -> dict[str, Comparison]:
        """Each group; the worst rank's, where every rank keeps its own."""
        true, everyone = self.truth.reference.gradients, measured.answers
        of_ranks = [answer.gradients for answer in everyone if answer.gradients]
        return {
            group: max((compare(of, true, names, self.truth.total) for of in of_ranks), key=_how_wrong)
            for group, names in self.truth.groups.items()
        }

    def _add(self, counts: tuple[int, ...], compared: dict[str, Comparison], tolerance: float) -> bool:
        """Rows; whether all are exact."""
        scalars = self.truth.scalars
        new = [Row(counts, "parameters", g, c, c.verdict(tolerance), g in scalars) for g, c in compared.items()]
        self.rows += new
        return all(row.exact for row in new)

    def _inputs(self, measured: Measured) -> list[Row]:
        true, found = self.truth.reference.inputs, measured.inputs
        compared = {name: compare(found, true, [name], norm(true)) for name in true if name in found}
        of = self.truth.tolerance
        return [Row(measured.trial.counts, "input", name, c, c.verdict(of)) for name, c in compared.items()]

    def _look_at_values(self, measured: Measured) -> None:
        """What is worth knowing where gradients are right."""
        losses, mean, true = measured.losses, measured.mean, self.truth.reference.losses[0]
        shown = f"{' and '.join(map(number, losses))}, one process {number(true)}"
        if not same(mean, true):
            self.findings.append(Finding(causes.VALUE_IS_ANOTHER, measured.trial.counts, (), shown))
        elif not all(same(x, losses[0]) for x in losses):
            self.findings.append(Finding(causes.VALUES_DIFFER, measured.trial.counts, (), shown))


def _how_wrong(compared: Comparison) -> float:
    return math.inf if math.isnan(compared.error) else compared.error


def splits(rows: int, size: int, *, uneven: bool, empty: bool) -> list[tuple[int, ...]]:
    """Rows of each rank: equal parts first.

    >>> splits(12, 3, uneven=True, empty=True)
    [(4, 4, 4), (2, 4, 6), (6, 0, 6)]
    """
    made = [Partition.even(rows, size).counts]
    if uneven and rows > size:
        weights = [rank + 1 for rank in range(size)]
        parts = [max(1, rows * weight // sum(weights)) for weight in weights]
        parts[-1] += rows - sum(parts)
        made.append(tuple(parts))
    if empty and size > 1:
        first, *others = Partition.even(rows, size - 1).counts
        made.append((first, 0, *others))
    return list(dict.fromkeys(made))


def _each_once(findings: Sequence[Finding]) -> list[Finding]:
    """The first of each cause; where there is a particular one, none that says no more than the figures do."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.cause.name, finding)
    particular = any(finding.cause.wrong and name not in causes.GENERAL for name, finding in first.items())
    return [finding for name, finding in first.items() if not (particular and name in causes.GENERAL)]


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _versions() -> dict[str, str]:
    return {
        "wholebatch": importlib.metadata.version("wholebatch"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
