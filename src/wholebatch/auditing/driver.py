"""The audit: one process first, then several, then the causes of a difference."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .._base.settings import shown
from .._base.user_error import UserError
from . import causes, multi_rank, one_process
from .arguments import check_arguments
from .baseline import first_run, make_baseline
from .batch import splits
from .compare import Comparison, compare, norm, number, same, wrong_groups
from .differences import smooth_step
from .factory import find
from .report import Finding, Report, Row
from .runs import Baseline, FailureError, Measured, Runs
from .suppress_output import suppress_output
from .trial import Facts, Trial

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}


def audit(
    problem: Any,  # a factory of whatever form a user has: it is called, and its result is checked
    ranks: Sequence[int] = (1, 2, 3),
    *,
    tolerance: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    diagnose: bool = True,
    timeout_s: float = 120,
    name: str | None = None,
) -> Report:
    r"""Compare the final gradient of W ranks with that of one process on the whole batch, and find the causes.

    ratio = <g, t> / <t, t>,   cosine = <g, t> / |g| |t|,   relative error = |g - t| / |t|;   g: W ranks', t: one's

    The problem runs on real processes (gloo, CPU), with the batch split evenly and, if the problem allows it, unevenly;
    its gradients are reduced as its engine would; all of it in float64. On one process the gradient is compared with
    that of the reference, or with finite differences of the returned loss. Where a gradient is wrong, further runs find
    out why (see `docs/audit.md`). No process outlives the call.

    Args:
        problem: a function that returns a :class:`wholebatch.Problem`, or (model, batch, loss); or its name,
            "module:function". Every rank calls it, many times, always after the same seeds.
        ranks: numbers of ranks W. The batch should have a multiple of each; if it has not, and the problem is not
            `uneven`, its last rows are left out.
        tolerance: of the relative error; None: 1e-5 in float64, 1e-3 in float32.
        dtype: torch.float64 or torch.float32. A model that cannot run in float64 is run in float32, and a note says so.
        seed: of all default random generators.
        diagnose: whether to look for causes.
        timeout_s: for each group of processes, in seconds.
        name: of the problem in the report.

    Returns:
        :class:`wholebatch.auditing.Report`: print it; `exact` is the verdict, `causes` are the causes' names.

    Raises:
        ValueError: if the problem is invalid, raises on one process, or is not deterministic there.

    >>> import wholebatch as wb
    >>> report = wb.audit("my_project.audits:clip", ranks=(1, 2))  # doctest: +SKIP
    >>> assert report.exact, report  # doctest: +SKIP
    """
    started = time.monotonic()
    check_arguments(ranks, tolerance, timeout_s, seed)
    if not isinstance(dtype, torch.dtype) or dtype not in _TOLERANCES:
        raise UserError(f"dtype must be torch.float64 or torch.float32, got {shown(dtype)}")
    if not isinstance(diagnose, bool):
        raise UserError(f"diagnose must be True or False, got {shown(diagnose)}")
    if name is not None and not isinstance(name, str):
        raise UserError(f"name must be a string, got {shown(name)}")
    ranks = tuple(dict.fromkeys(ranks))
    with suppress_output():
        find(problem)
    runs, measured, reference, notes = first_run(problem, dtype, seed, timeout_s)
    baseline, more = make_baseline(runs, measured, reference, ranks, tolerance or _TOLERANCES[runs.dtype])
    auditor = _Audit(runs, measured.facts, baseline, diagnose=diagnose)
    auditor.one_process()
    for size in ranks:
        if size > 1 and not auditor.hangs:  # it would hang again, for as long
            auditor.multi_rank(size)
    return Report(
        name or str(problem if isinstance(problem, str) else getattr(problem, "__name__", "problem")),
        tuple(auditor.rows),
        tuple(_distinct(sorted(auditor.findings, key=lambda finding: not finding.cause.wrong))),
        tuple(dict.fromkeys(notes + more + auditor.notes)),
        auditor.values,
        str(runs.dtype).removeprefix("torch."),
        baseline.tolerance,
        time.monotonic() - started,
        _versions(),
    )


class _Audit:
    """Rows and findings, accumulated split by split."""

    def __init__(self, runs: Runs, facts: Facts, baseline: Baseline, *, diagnose: bool) -> None:
        self.runs, self.facts, self.baseline, self.diagnose = runs, facts, baseline, diagnose
        self.rows: list[Row] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.values: dict[tuple[int, ...], tuple[float, ...]] = {}
        self.with_inputs = True
        self.hangs = False
        self.explained: set[tuple[bool, frozenset[str]]] = set()  # whether parts are unequal, and the wrong groups
        self.wrong_on_one = False
        self.by_differences: dict[str, float] | None = None  # the truth along directions, where one process is wrong

    def one_process(self) -> None:
        """Check the gradient on one process against the reference or finite differences."""
        baseline, runs = self.baseline, self.runs
        measured, tolerance, close = baseline.measured, baseline.tolerance, baseline.close
        counts = measured.trial.counts
        self.values[counts] = (measured.losses[0],)
        step: float | None = None
        slopes: dict[str, float] = {}
        try:
            step, slopes, close = smooth_step(runs, baseline, measured.trial)
        except FailureError as failure:
            self.notes.append(f"finite differences of the loss failed: {failure.summary}")
        self.baseline = baseline = replace(baseline, step=step, close=close)
        if self.facts.has_reference:
            compared = baseline.compare(measured.gradients)
        elif step is not None:
            compared, tolerance = one_process.against_differences(baseline, measured, slopes), close
        elif self.facts.calls_backward:
            compared = {}
            self.findings.append(Finding(causes.NOT_CHECKED, counts, (), "differences with several steps disagree"))
        else:
            self.notes.append("the loss is not smooth enough to check one process's gradient by finite differences")
            compared = {}
        findings = one_process.diagnose(runs, baseline, compared, tolerance, slopes) if self.diagnose else []
        if not any(finding.cause is causes.DETACHED for finding in findings):
            right = self._add(counts, compared, tolerance)
            self.wrong_on_one = not right
            self.by_differences = None if right or self.facts.has_reference else slopes
        else:
            self.baseline = baseline = replace(baseline, detached=True)
        self.findings += findings
        if self.diagnose and not self.facts.has_reference:
            self._check_micro_batches()
        if self.facts.has_reference and any(row.kind == "input" and not row.exact for row in self._inputs(measured)):
            self.with_inputs = False
            self.notes.append("inputs are left out: on one process their gradient is not the reference's")
        missing = measured.answers[0].missing
        unused = [name for name in missing if not baseline.reference.gradients[name].count_nonzero()]
        if unused:
            self.findings.append(Finding(causes.UNUSED, counts, tuple(unused), "grad is None"))
        if baseline.eval_modules:  # several ranks run in evaluation mode: so must their baseline
            of_both = (measured.trial, baseline.reference.trial)
            trials = [Trial(t.counts, t.rows, t.reference, baseline.eval_modules) for t in of_both]
            measured, reference = runs.measure(trials)
            self.baseline = replace(baseline, measured=measured, reference=reference)

    def _check_micro_batches(self) -> None:
        """Report if the loss of one process, which counts as that of the whole batch, is a mean of several losses."""
        evidence = one_process.micro_batches(self.runs, self.baseline)
        if evidence is not None:
            cause = replace(causes.MICRO_BATCHES, wrong=False)
            self.findings.append(Finding(cause, self.baseline.measured.trial.counts, (), evidence))

    def multi_rank(self, size: int) -> None:
        """Check equal parts, and the other splits that the problem allows."""
        rows = self.baseline.measured.trial.rows
        of_sizes = splits(len(rows), size, uneven=self.facts.uneven, empty=self.facts.empty)
        for measured in self._measured([Trial(n, rows, eval_modules=self.baseline.eval_modules) for n in of_sizes]):
            counts = measured.trial.counts
            self.values[counts] = tuple(measured.losses)
            if self.by_differences is not None:
                compared = one_process.against_differences(self.baseline, measured, self.by_differences)
                self._add(counts, compared, self.baseline.close)
                self.notes.append(
                    "fix the mistake on one process first; then the audit looks for causes on several ranks"
                )
                continue
            compared = self._compare_groups(measured)
            right = self._add(counts, compared, self.baseline.tolerance)
            if self.with_inputs and self.facts.engine != "none":  # there only the step knows its scale of a rank's rows
                self.rows += self._inputs(measured)
            if right:
                self._check_values(measured)
            elif self.diagnose:
                self._explain(measured, compared)

    def _explain(self, measured: Measured, compared: dict[str, Comparison]) -> None:
        """Look for causes, unless fewer ranks with the same symptoms have shown a particular one."""
        baseline = self.baseline
        if self.wrong_on_one:
            with_one = baseline.compare(measured.gradients, baseline.measured.gradients)
            if all(comparison.error <= baseline.tolerance for comparison in with_one.values()):
                self.notes.append("on several ranks the gradient is that of one process, which is wrong")
                return
        symptoms = (len(set(measured.trial.counts)) > 1, frozenset(wrong_groups(compared, baseline.tolerance)))
        if symptoms in self.explained:
            return
        findings = multi_rank.diagnose(self.runs, baseline, measured, compared)
        self.findings += findings
        if any(finding.cause.name not in causes.GENERAL for finding in findings):
            self.explained.add(symptoms)

    def _measured(self, trials: Sequence[Trial]) -> list[Measured]:
        """Return the outcomes of the trials that end, and add a finding for the others."""
        try:
            return self.runs.measure(trials)
        except FailureError as failure:
            self.hangs = failure.hangs
            if len(trials) > 1 and not failure.hangs:  # find the one that failed
                return [measured for trial in trials for measured in self._measured([trial])]
            cause, rank = (causes.HANGS, "") if failure.hangs else (causes.RAISES, failure.rank)
            evidence = f"rank {rank}: {failure.summary}" if rank else failure.summary
            self.findings.append(Finding(cause, trials[0].counts, (), evidence))
            return []

    def _compare_groups(self, measured: Measured) -> dict[str, Comparison]:
        """Compare each group; the worst rank's, where ranks end with different gradients."""
        of_ranks = [self.baseline.compare(answer.gradients) for answer in measured.answers if answer.gradients]
        return {g: max((compared[g] for compared in of_ranks), key=_error_or_inf) for g in self.baseline.groups}

    def _add(self, counts: tuple[int, ...], compared: dict[str, Comparison], tolerance: float) -> bool:
        """Add rows, and return whether all are exact."""
        scalars = self.baseline.scalars
        new = [Row(counts, "parameters", g, c, c.verdict(tolerance), g in scalars) for g, c in compared.items()]
        self.rows += new
        return all(row.exact for row in new)

    def _inputs(self, measured: Measured) -> list[Row]:
        true, inputs = self.baseline.reference.inputs, measured.inputs
        compared = {name: compare(inputs, true, [name], norm(true)) for name in true if name in inputs}
        tolerance = self.baseline.tolerance
        return [Row(measured.trial.counts, "input", name, c, c.verdict(tolerance)) for name, c in compared.items()]

    def _check_values(self, measured: Measured) -> None:
        """Report losses whose values differ, though the gradient is right."""
        losses, mean, true = measured.losses, measured.mean, self.baseline.reference.losses[0]
        evidence = f"{' and '.join(map(number, losses))}, one process {number(true)}"
        if not same(mean, true):
            self.findings.append(Finding(causes.VALUE_NOT_GLOBAL, measured.trial.counts, (), evidence))
        elif not measured.replicated:
            self.findings.append(Finding(causes.VALUES_DIFFER, measured.trial.counts, (), evidence))


def _error_or_inf(compared: Comparison) -> float:
    return math.inf if math.isnan(compared.error) else compared.error


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first finding of each cause; general causes only where there is no particular one."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.cause.name, finding)
    particular = any(finding.cause.wrong and name not in causes.GENERAL for name, finding in first.items())
    return [finding for name, finding in first.items() if not (particular and name in causes.GENERAL)]


def _versions() -> dict[str, str]:
    return {
        "wholebatch": importlib.metadata.version("wholebatch"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
