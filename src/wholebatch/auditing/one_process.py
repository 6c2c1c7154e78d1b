"""Check on one process that the gradient is that of the returned loss, and find causes if it is not.

With a reference, its gradient is the truth. Without one, products of the gradient with a direction for each group are
compared with finite differences of the loss. A mistake found here is wrong on any number of ranks: gradient
accumulation and caching can get dropout, temperatures and chunks wrong without any other process.
"""

from __future__ import annotations

import math
from dataclasses import replace

from . import causes
from .compare import Comparison, compare, inner, number, same, wrong_groups
from .differences import derivatives, derivatives_within
from .report import Finding
from .runs import Baseline, FailureError, Measured, Runs


def against_differences(baseline: Baseline, measured: Measured, slopes: dict[str, float]) -> dict[str, Comparison]:
    """Compare each group's gradient along its direction with finite differences of the loss."""
    comparisons = {}
    for group, direction in baseline.directions.items():
        ours, true = inner(measured.gradients, direction), slopes[group]
        if abs(true) <= 1e-6 * baseline.total:
            comparisons[group] = Comparison(float("nan"), float("nan"), abs(ours - true) / baseline.total, float("nan"))
        else:
            comparisons[group] = Comparison(ours / true, float("nan"), abs(ours / true - 1), 0.0)
    return comparisons


def diagnose(
    runs: Runs, baseline: Baseline, compared: dict[str, Comparison], tolerance: float, differences: dict[str, float]
) -> list[Finding]:
    """Return the causes of wrong groups on one process.

    `differences` are those of the returned loss along each group's direction.
    """
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
    if answer.drew and baseline.step is not None and _right_without_randomness(runs, baseline, wrong):
        return finding(
            causes.DROPOUT_NOT_REPLAYED, wrong, "with dropout switched off, the gradient is that of the returned loss"
        )
    findings = []
    ratios = {g: compared[g].ratio for g in wrong if g not in without}
    passes = {answer.passes.get(name, 0) for g in ratios for name in baseline.groups[g]}
    n = passes.pop() if len(passes) == 1 else 1
    if n > 1 and all(abs(ratio / n - 1) < 10 * tolerance for ratio in ratios.values()):
        cause = causes.SCALE_TIMES_STEPS if set(ratios) <= set(baseline.scalars) else causes.EVERYTHING_TIMES_STEPS
        findings += finding(cause, [*ratios], f"{n} backward passes, and {n} times the gradient")
    if without:
        findings += finding(causes.NO_GRADIENT, without, "their gradient is 0 or None")
    if findings:
        return findings
    if facts.has_reference and baseline.step is not None:
        of_its_loss = against_differences(baseline, measured, differences)
        if not wrong_groups(of_its_loss, baseline.close):
            changed = micro_batches(runs, baseline)
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
    if _stops_at_collectives(runs, baseline, wrong):
        return finding(causes.KEY_SIDE_MISSING, wrong, f"the results of collectives carry no gradient: {figures}")
    return finding(causes.DETACHED, wrong, figures)


def micro_batches(runs: Runs, baseline: Baseline) -> str | None:
    """Return the evidence that rows of different backward passes do not meet: the loss changes if two are exchanged."""
    measured = baseline.measured
    steps, (first, *between, last) = max(measured.answers[0].passes.values(), default=0), measured.trial.rows
    if steps < 2 or measured.answers[0].drew:
        return None
    try:
        (exchanged,) = runs.measure([replace(measured.trial, rows=(last, *between, first))])
    except FailureError:
        return None
    before, after = measured.losses[0], exchanged.losses[0]
    if same(before, after):
        return None
    return (
        f"{steps} backward passes, and on one process the loss is {number(before)}, but {number(after)} when the "
        "batch's first and last row change places"
    )


def _stops_at_collectives(runs: Runs, baseline: Baseline, wrong: list[str]) -> bool:
    """Return whether the gradient is that of finite differences while collectives return fixed results."""
    if baseline.step is None:
        return False
    try:
        within = derivatives_within(runs, baseline, baseline.measured.trial, wrong, baseline.step)
    except FailureError:
        return False
    return all(_agrees(baseline, inner(baseline.measured.gradients, baseline.directions[g]), within[g]) for g in wrong)


def _is_last(measured: Measured, wrong: list[str], baseline: Baseline) -> bool:
    """Return whether the parameters hold only the gradient of the last of several backward passes."""
    answer = measured.answers[0]
    names = [name for g in wrong for name in baseline.groups[g]]
    if max((answer.passes.get(name, 0) for name in names), default=0) < 2:
        return False
    last, total = (compare(measured.gradients, x, names, baseline.total) for x in (answer.last, answer.contributed))
    return last.error <= 1e-9 and total.error > baseline.tolerance


def _right_without_randomness(runs: Runs, baseline: Baseline, wrong: list[str]) -> bool:
    """Return whether gradient and finite differences agree in evaluation mode, where nothing is drawn."""
    assert baseline.step is not None
    for eval_modules in (("dropout",), ("all",)):
        trial = replace(baseline.measured.trial, eval_modules=eval_modules)
        try:
            (measured,) = runs.measure([trial])
            if measured.answers[0].drew:
                continue
            slopes = derivatives(runs, baseline, trial, wrong, baseline.step)
        except FailureError:
            return False
        grads = measured.gradients
        return all(_agrees(baseline, inner(grads, baseline.directions[g]), slopes[g].item()) for g in wrong)
    return False


def _agrees(baseline: Baseline, gradient: float, difference: float) -> bool:
    return abs(gradient - difference) <= baseline.close * max(abs(difference), 1e-6 * baseline.total)
