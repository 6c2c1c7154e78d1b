"""The audit: one process first, then several, then the causes of a difference."""

from __future__ import annotations

import contextlib
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
from .._launch.processes import RankError, RankTimeoutError
from . import causes, multi_rank, one_process
from .arguments import check_arguments
from .batch import splits
from .causes import Cause
from .compare import TOLERANCES, Comparison, compare, norm, number, same, wrong_groups
from .factory import find
from .measure import Trial
from .one_process import run_baseline
from .process_state import suppress_output
from .report import Finding, Report, Row
from .runs import Baseline, Measured, Runs, failure_summary, first_failure


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
        timeout_s: for each measurement on a group of processes, in seconds.
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
    if not isinstance(dtype, torch.dtype) or dtype not in TOLERANCES:
        raise UserError(f"dtype must be torch.float64 or torch.float32, got {shown(dtype)}")
    if not isinstance(diagnose, bool):
        raise UserError(f"diagnose must be True or False, got {shown(diagnose)}")
    if name is not None and not isinstance(name, str):
        raise UserError(f"name must be a string, got {shown(name)}")
    ranks = tuple(dict.fromkeys(ranks))
    with suppress_output():
        find(problem)
    with contextlib.closing(Runs(problem, seed, timeout_s)) as runs:
        baseline, notes = run_baseline(runs, ranks, dtype, tolerance)
        auditor = _Audit(baseline, notes, diagnose=diagnose)
        auditor.one_process()
        for size in ranks:
            if size > 1 and not auditor.hangs:  # it would hang again, for as long
                auditor.multi_rank(size)
    return Report(
        name or str(problem if isinstance(problem, str) else getattr(problem, "__name__", "problem")),
        tuple(auditor.rows),
        tuple(_distinct(sorted(auditor.findings, key=lambda finding: not finding.cause.wrong))),
        tuple(dict.fromkeys(auditor.notes)),
        auditor.values,
        str(runs.dtype).removeprefix("torch."),
        baseline.tolerance,
        time.monotonic() - started,
        _versions(),
    )


class _Audit:
    """Rows and findings, accumulated split by split."""

    def __init__(self, baseline: Baseline, notes: list[str], *, diagnose: bool) -> None:
        self.baseline, self.notes, self.diagnose = baseline, notes, diagnose
        self.rows: list[Row] = []
        self.findings: list[Finding] = []
        self.values: dict[tuple[int, ...], tuple[float, ...]] = {}
        self.with_inputs = True
        self.hangs = False
        self.explained: set[tuple[bool, frozenset[str]]] = set()  # whether parts are unequal, and the wrong groups
        self.wrong_on_one = False

    def one_process(self) -> None:
        """Check the gradient on one process against the reference or finite differences."""
        baseline = self.baseline
        measured, counts, facts = baseline.measured, baseline.measured.trial.counts, baseline.facts
        self.values[counts] = (measured.losses[0],)
        compared: dict[str, Comparison] = {}
        tolerance = baseline.tolerance if facts.has_reference else baseline.close
        if facts.has_reference:
            compared = baseline.compare(measured.gradients)
        elif baseline.step is not None:
            compared = one_process.against_differences(baseline, measured)
        elif facts.calls_backward:
            self._find(causes.NOT_CHECKED, counts, "differences with several steps disagree")
        else:
            self.notes.append("the loss is not smooth enough to check one process's gradient by finite differences")
        findings = one_process.diagnose(baseline, compared, tolerance) if self.diagnose else []
        detached = any(finding.cause is causes.DETACHED for finding in findings)
        self.wrong_on_one = not detached and not self._add(counts, compared, tolerance)
        self.findings += findings
        if self.diagnose and not facts.has_reference:
            evidence = one_process.micro_batches(baseline)
            if evidence is not None:  # the loss of one process, which counts as that of the whole batch, is a mean
                self._find(replace(causes.MICRO_BATCHES, wrong=False), counts, evidence)
        if facts.has_reference and any(row.kind == "input" and not row.exact for row in self._inputs(measured)):
            self.with_inputs = False
            self.notes.append("inputs are left out: on one process their gradient is not the reference's")
        missing = measured.answers[0].missing
        unused = [name for name in missing if not baseline.reference.gradients[name].count_nonzero()]
        if unused:
            self._find(causes.UNUSED, counts, "grad is None", tuple(unused))
        reference = baseline.reference
        if baseline.eval_modules:  # several ranks run in evaluation mode: so must their baseline
            trials = [replace(m.trial, eval_modules=baseline.eval_modules) for m in (measured, reference)]
            measured, reference = baseline.runs.measure(trials)
        self.baseline = replace(baseline, measured=measured, reference=reference, detached=detached)

    def multi_rank(self, size: int) -> None:
        """Check equal parts, and the other splits that the problem allows."""
        baseline, facts = self.baseline, self.baseline.facts
        rows = baseline.measured.trial.rows
        counts_of_splits = splits(len(rows), size, uneven=facts.uneven, empty=facts.empty)
        for measured in self._measured([Trial(n, rows, eval_modules=baseline.eval_modules) for n in counts_of_splits]):
            counts = measured.trial.counts
            self.values[counts] = tuple(measured.losses)
            if self.wrong_on_one and not facts.has_reference:  # the differences of the loss are the truth
                self._add(counts, one_process.against_differences(baseline, measured), baseline.close)
                self.notes.append(
                    "fix the mistake on one process first; then the audit looks for causes on several ranks"
                )
                continue
            compared = self._compare_groups(measured)
            right = self._add(counts, compared, baseline.tolerance)
            if self.with_inputs and facts.engine != "none":  # there only the step knows its scale of a rank's rows
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
        findings = multi_rank.diagnose(baseline, measured, compared)
        self.findings += findings
        if any(finding.cause.name not in causes.GENERAL for finding in findings):
            self.explained.add(symptoms)

    def _measured(self, trials: Sequence[Trial]) -> list[Measured]:
        """Return the outcomes of the trials that end, and add a finding for the others."""
        try:
            return self.baseline.runs.measure(trials)
        except RankTimeoutError as error:
            self.hangs = True
            self._find(causes.HANGS, trials[0].counts, failure_summary(error))
        except RankError as error:
            if len(trials) > 1:  # find the one that failed
                return [measured for trial in trials for measured in self._measured([trial])]
            rank, _ = first_failure(error)
            self._find(causes.RAISES, trials[0].counts, f"rank {rank}: {failure_summary(error)}")
        return []

    def _compare_groups(self, measured: Measured) -> dict[str, Comparison]:
        """Compare each group; the worst rank's, where ranks end with different gradients."""
        rank_comparisons = [self.baseline.compare(answer.gradients) for answer in measured.answers if answer.gradients]
        return {g: max((compared[g] for compared in rank_comparisons), key=_error_or_inf) for g in self.baseline.groups}

    def _find(self, cause: Cause, counts: tuple[int, ...], evidence: str, names: tuple[str, ...] = ()) -> None:
        self.findings.append(Finding(cause, counts, names, evidence))

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
            self._find(causes.VALUE_NOT_GLOBAL, measured.trial.counts, evidence)
        elif not measured.replicated:
            self._find(causes.VALUES_DIFFER, measured.trial.counts, evidence)


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
