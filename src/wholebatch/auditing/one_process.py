"""The problem on one process: its gradient is the baseline for several ranks, once it has been checked.

With a reference, its gradient is the truth. Without one, products of the gradient with a direction for each group are
compared with finite differences of the loss. A mistake found here is wrong on any number of ranks: gradient
accumulation and caching can get dropout, temperatures and chunks wrong without any other process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from .._base.user_error import UserError
from .._launch.processes import RankError
from . import causes
from .compare import TOLERANCES, Comparison, directions, grouped, inner, norm, number, same, wrong_groups
from .differences import CLOSE, derivatives, derivatives_within, with_slopes
from .measure import EvalModules, Facts, Trial
from .report import Finding
from .runs import Baseline, Measured, Runs, failure_summary, probe

_WHOLE = Trial((-1,), ())  # all rows, on one rank


def run_baseline(
    runs: Runs, ranks: Sequence[int], dtype: torch.dtype, tolerance: float | None
) -> tuple[Baseline, list[str]]:
    """Return the baseline for the rows that all splits have, and notes.

    Raises:
        UserError: if the problem fails on one process, is not deterministic there, or has nothing to compare.
    """
    measured, reference, notes = _first_run(runs, dtype)
    rows = _common_rows(measured.facts, ranks, notes)
    whole = Trial((rows,), tuple(range(rows)))
    if rows == measured.facts.rows:
        measured = replace(measured, trial=whole)
        reference = replace(reference, trial=replace(whole, reference=True))
    else:
        measured, reference = runs.measure([whole, replace(whole, reference=True)])
    total = norm(reference.gradients)
    if not total or not math.isfinite(total):
        raise UserError(
            f"on one process the norm of the whole gradient is {total}: there is nothing to compare. Does the step end "
            "with zero_grad(), is everything detached, or is the loss constant, as with one row?"
        )
    groups = grouped(reference.gradients)
    eval_modules: tuple[EvalModules, ...] = ()
    if measured.answers[0].drew and max(ranks) > 1:
        eval_modules = _modules_that_draw(runs, whole)
        modules = "its dropout modules" if eval_modules == ("dropout",) else "the model"
        notes.append(f"on several ranks with {modules} in evaluation mode, because ranks draw different random numbers")
    baseline = Baseline(
        runs,
        measured,
        reference,
        groups,
        directions(reference.gradients, groups),
        total,
        tolerance or TOLERANCES[runs.dtype],
        eval_modules,
        CLOSE[runs.dtype],
    )
    try:
        baseline = with_slopes(baseline)
    except RankError as error:
        notes.append(f"finite differences of the loss failed: {failure_summary(error)}")
    return baseline, notes


def _first_run(runs: Runs, dtype: torch.dtype) -> tuple[Measured, Measured, list[str]]:
    """Set the runs so that the problem runs on one process, and return its outcome, its reference's, and notes."""
    first: RankError | None = None
    for used in dict.fromkeys((dtype, torch.float32)):
        for inputs in (True, False):
            runs.dtype, runs.inputs = used, inputs
            try:
                measured, again, reference = runs.measure([_WHOLE, _WHOLE, replace(_WHOLE, reference=True)])
            except RankError as error:
                first = first or error
                continue
            _check_deterministic(measured, again)
            notes = []
            if first is not None:
                how = "computed in float32: in float64" if used != dtype else "no gradients by the batch: with them"
                notes.append(f"{how} it raises {failure_summary(first)}")
            printed = measured.answers[0].printed.strip()
            if printed:
                notes.append(f"the problem's output is left out ({printed.partition(chr(10))[0]!r}, ...)")
            return measured, reference, notes
        if not any(word in str(first) for word in ("dtype", "Double", "float64", "scalar type")):
            break
    assert first is not None
    raise UserError(f"on one process the problem failed: {failure_summary(first)}") from first


def _check_deterministic(first: Measured, again: Measured) -> None:
    differ = [
        name for name, x in first.gradients.items() if not torch.allclose(x, again.gradients[name], rtol=1e-9, atol=0)
    ]
    if first.losses != again.losses or differ:
        raise UserError(
            f"two runs of one process differ (losses {first.losses[0]!r} and {again.losses[0]!r}), though both had "
            "the same seeds: data and weights must come from torch's, numpy's or random's default generator, or one "
            "with a seed; and each call of the factory must make its own model"
        )


def _common_rows(facts: Facts, ranks: Sequence[int], notes: list[str]) -> int:
    """Return how many of the batch's rows are used; note it if some are left out."""
    rows = facts.rows
    if facts.uneven:
        if rows < max(ranks):
            raise UserError(f"a batch of {rows} rows cannot be split over {max(ranks)} ranks: give it more rows")
        return rows
    multiple = math.lcm(*ranks)
    even = rows - rows % multiple
    if not even:
        raise UserError(
            f"a batch of {rows} rows cannot be split evenly over {_joined(ranks)} ranks: give it a multiple of "
            f"{multiple} rows, or uneven=True where ranks may have different numbers"
        )
    if even < rows:
        notes.append(f"the first {even} of {rows} rows, which can be split evenly over all numbers of ranks")
    return even


def _modules_that_draw(runs: Runs, whole: Trial) -> tuple[EvalModules, ...]:
    """Return the modules that must be in evaluation mode so that nothing is drawn."""
    measured = _without_drawing(runs, whole)
    if measured is None:
        raise UserError(
            "the forward pass draws random numbers, in evaluation mode, too, and several ranks draw other numbers than "
            "one process: make them part of the batch, or audit with ranks=(1,) alone"
        )
    return measured.trial.eval_modules


def _without_drawing(runs: Runs, trial: Trial) -> Measured | None:
    """Return the outcome with dropout, else with all modules in evaluation mode; None if numbers are still drawn."""
    choices: tuple[tuple[EvalModules, ...], ...] = (("dropout",), ("all",))
    for eval_modules in choices:
        (measured,) = runs.measure([replace(trial, eval_modules=eval_modules)])
        if not measured.answers[0].drew:
            return measured
    return None


def _joined(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def against_differences(baseline: Baseline, measured: Measured) -> dict[str, Comparison]:
    """Compare each group's gradient along its direction with finite differences of the loss."""
    comparisons = {}
    for group, direction in baseline.directions.items():
        ours, true = inner(measured.gradients, direction), baseline.slopes[group]
        if abs(true) <= 1e-6 * baseline.total:
            comparisons[group] = Comparison(float("nan"), float("nan"), abs(ours - true) / baseline.total, float("nan"))
        else:
            comparisons[group] = Comparison(ours / true, float("nan"), abs(ours / true - 1), 0.0)
    return comparisons


def diagnose(baseline: Baseline, compared: dict[str, Comparison], tolerance: float) -> list[Finding]:
    """Return the causes of wrong groups on one process."""
    wrong = wrong_groups(compared, tolerance)
    if not wrong:
        return []
    measured = baseline.measured
    answer, counts, facts = measured.answers[0], measured.trial.counts, measured.facts
    trusted = not facts.calls_backward and not facts.has_reference  # the gradient is autograd's, of the returned loss

    def finding(cause: causes.Cause, groups: list[str], evidence: str) -> list[Finding]:
        return [Finding(cause, counts, tuple(groups), evidence)]

    without = [g for g in wrong if compared[g].verdict(tolerance) == "no gradient"]
    if not trusted and len(answer.calls) > 1 and answer.calls[-1] and not any(answer.calls[:-1]):
        return finding(
            causes.LAST_CHUNK_ONLY,
            wrong,
            f"of {len(answer.calls)} calls of the model with gradients on, only the last one's output received one",
        )
    if _is_last(measured, wrong, baseline):
        steps = max(answer.passes.values())
        return finding(
            causes.LAST_CHUNK_ONLY,
            wrong,
            f"{steps} backward passes gave gradients, and the parameters hold only the last one's",
        )
    if answer.drew and baseline.step is not None and _right_without_randomness(baseline, wrong):
        return finding(
            causes.DROPOUT_NOT_REPLAYED, wrong, "with dropout switched off, the gradient is that of the returned loss"
        )
    findings = []
    ratios = {g: compared[g].ratio for g in wrong if g not in without}
    n = measured.passes([name for g in ratios for name in baseline.groups[g]])
    if n > 1 and all(abs(ratio / n - 1) < 10 * tolerance for ratio in ratios.values()):
        cause = causes.SCALE_TIMES_STEPS if set(ratios) <= set(baseline.scalars) else causes.EVERYTHING_TIMES_STEPS
        findings += finding(cause, [*ratios], f"{n} backward passes, and {n} times the gradient")
    if without:
        findings += finding(causes.NO_GRADIENT, without, "their gradient is 0 or None")
    if findings:
        return findings
    if facts.has_reference and baseline.step is not None:
        loss_comparisons = against_differences(baseline, measured)
        if not wrong_groups(loss_comparisons, baseline.close):
            changed = micro_batches(baseline)
            losses = f"the loss is {number(measured.losses[0])}, the reference's {number(baseline.reference.losses[0])}"
            return finding(causes.MICRO_BATCHES if changed else causes.LOSS_DIFFERS, wrong, changed or losses)
    figures = f"along a direction of each group, {', '.join(f'{g} x {number(r)}' for g, r in ratios.items())}"
    uniform = max(ratios.values()) - min(ratios.values()) <= 10 * tolerance * abs(max(ratios.values()))
    if uniform and not trusted and set(ratios) == {g for g, c in compared.items() if not math.isnan(c.ratio)}:
        return finding(causes.UNIFORM_SCALING, wrong, figures)
    factor = max(ratios.values())
    integer = uniform and any(abs(f - round(f)) <= 10 * tolerance and round(f) > 1 for f in (factor, 1 / factor))
    if integer or not trusted:
        return finding(causes.NOT_OF_ITS_LOSS, wrong, figures)
    if _stops_at_collectives(baseline, wrong):
        return finding(causes.KEY_SIDE_MISSING, wrong, f"the results of collectives carry no gradient: {figures}")
    return finding(causes.DETACHED, wrong, figures)


@probe
def micro_batches(baseline: Baseline) -> str | None:
    """Return the evidence that rows of different backward passes do not meet: the loss changes if two are exchanged."""
    measured = baseline.measured
    steps, (first, *between, last) = max(measured.answers[0].passes.values(), default=0), measured.trial.rows
    if steps < 2 or measured.answers[0].drew:
        return None
    exchanged = baseline.again(measured, rows=(last, *between, first))
    before, after = measured.losses[0], exchanged.losses[0]
    if same(before, after):
        return None
    return (
        f"{steps} backward passes, and on one process the loss is {number(before)}, but {number(after)} when the "
        "batch's first and last row change places"
    )


@probe
def _stops_at_collectives(baseline: Baseline, wrong: list[str]) -> bool:
    """Return whether the gradient is that of finite differences while collectives return fixed results."""
    if baseline.step is None:
        return False
    within = derivatives_within(baseline, baseline.measured.trial, wrong)
    return all(_agrees(baseline, inner(baseline.measured.gradients, baseline.directions[g]), within[g]) for g in wrong)


def _is_last(measured: Measured, wrong: list[str], baseline: Baseline) -> bool:
    """Return whether the parameters hold only the gradient of the last of several backward passes."""
    answer = measured.answers[0]
    if max((answer.passes.get(name, 0) for g in wrong for name in baseline.groups[g]), default=0) < 2:
        return False
    last, total = (baseline.compare_together(measured.gradients, x, wrong) for x in (answer.last, answer.contributed))
    return last.error <= 1e-9 and total.error > baseline.tolerance


@probe
def _right_without_randomness(baseline: Baseline, wrong: list[str]) -> bool:
    """Return whether gradient and finite differences agree in evaluation mode, where nothing is drawn."""
    measured = _without_drawing(baseline.runs, baseline.measured.trial)
    if measured is None:
        return False
    slopes, grads = derivatives(baseline, measured.trial, wrong), measured.gradients
    return all(_agrees(baseline, inner(grads, baseline.directions[g]), slopes[g].item()) for g in wrong)


def _agrees(baseline: Baseline, gradient: float, difference: float) -> bool:
    return abs(gradient - difference) <= baseline.close * max(abs(difference), 1e-6 * baseline.total)
