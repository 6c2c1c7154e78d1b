"""On one process: whether the gradient is that of the loss that is returned.

With a reference it is compared with that of the reference. Without one, its products with a direction for each group
are compared with differences of the loss itself. What is wrong here is wrong on any number of ranks: gradient
accumulation and caching get dropout, temperatures and chunks wrong without any other process.
"""

from __future__ import annotations

import math
from dataclasses import replace

from . import causes
from .compare import Comparison, compare, inner, number, same
from .differences import derivatives, derivatives_within
from .report import Finding
from .runs import FailureError, Measured, Runs, Truth


def against_reference(truth: Truth) -> dict[str, Comparison]:
    """Each group's gradient and the reference's."""
    return {
        group: compare(truth.local.gradients, truth.reference.gradients, names, truth.total)
        for group, names in truth.groups.items()
    }


def against_differences(truth: Truth, measured: Measured, found: dict[str, float]) -> dict[str, Comparison]:
    """Each group's gradient along its direction, and what differences of the loss say of it."""
    made = {}
    for group, direction in truth.directions.items():
        ours, true = inner(measured.gradients, direction), found[group]
        if abs(true) <= 1e-6 * truth.total:
            made[group] = Comparison(float("nan"), float("nan"), abs(ours - true) / truth.total, float("nan"))
        else:
            made[group] = Comparison(ours / true, float("nan"), abs(ours / true - 1), 0.0)
    return made


def diagnose(
    runs: Runs, truth: Truth, compared: dict[str, Comparison], tolerance: float, differences: dict[str, float]
) -> list[Finding]:
    """Why groups are wrong on one process; `differences` are those of the returned loss, along each direction."""
    wrong = [g for g, c in compared.items() if c.verdict(tolerance) != "exact"]
    if not wrong:
        return []
    local = truth.local
    answer, counts = local.answers[0], local.trial.counts
    facts = local.facts
    trusted = not facts.calls_backward and not facts.has_reference  # autograd's own gradient of what was returned

    def finding(cause: causes.Cause, groups: list[str], evidence: str) -> list[Finding]:
        return [Finding(cause, counts, tuple(groups), evidence)]

    without = [g for g in wrong if compared[g].verdict(tolerance) == "no gradient"]
    if not trusted and len(answer.calls) > 1 and answer.calls[-1] and not any(answer.calls[:-1]):
        return finding(
            causes.LAST_CHUNK_ONLY,
            wrong,
            f"of {len(answer.calls)} calls of the model with gradients on, only the last one's output got one",
        )
    if _is_last(local, wrong, truth):
        steps = max(answer.passes.values())
        return finding(
            causes.LAST_CHUNK_ONLY,
            wrong,
            f"{steps} backward passes brought gradients, and the parameters hold what the last one brought",
        )
    if answer.drew and truth.step is not None and _right_when_quiet(runs, truth, wrong):
        return finding(
            causes.DROPOUT_NOT_REPLAYED, wrong, "with dropout switched off, the gradient is that of the returned loss"
        )
    found = []
    ratios = {g: compared[g].ratio for g in wrong if g not in without}
    passes = {answer.passes.get(name, 0) for g in ratios for name in truth.groups[g]}
    n = passes.pop() if len(passes) == 1 else 1
    if n > 1 and all(abs(ratio / n - 1) < 10 * tolerance for ratio in ratios.values()):
        cause = causes.SCALE_TIMES_STEPS if set(ratios) <= set(truth.scalars) else causes.EVERYTHING_TIMES_STEPS
        found += finding(cause, [*ratios], f"{n} backward passes, and {n} times the gradient")
    if without:
        found += finding(causes.NO_GRADIENT, without, "their gradient is 0 or None")
    if found:
        return found
    if facts.has_reference and truth.step is not None:
        of_its_loss = against_differences(truth, local, differences).values()
        if all(c.verdict(truth.close) == "exact" for c in of_its_loss):
            apart = micro_batches(runs, truth)
            losses = f"the loss is {number(local.losses[0])}, the reference's {number(truth.reference.losses[0])}"
            return finding(causes.MICRO_BATCHES if apart else causes.ANOTHER_LOSS, wrong, apart or losses)
    figures = f"along a direction of each group, {', '.join(f'{g} x {number(r)}' for g, r in ratios.items())}"
    alike = max(ratios.values()) - min(ratios.values()) <= 10 * tolerance * abs(max(ratios.values()))
    if alike and not trusted and set(ratios) == {g for g, c in compared.items() if not math.isnan(c.ratio)}:
        return finding(causes.SCALED_ALIKE, wrong, figures)
    factor = max(ratios.values())
    clean = alike and any(abs(f - round(f)) <= 10 * tolerance and round(f) > 1 for f in (factor, 1 / factor))
    if clean or not trusted:
        return finding(causes.NOT_OF_ITS_LOSS, wrong, figures)
    if _stops_at_collectives(runs, truth, wrong):
        return finding(causes.KEY_SIDE_MISSING, wrong, f"what collectives give carries no gradient: {figures}")
    return finding(causes.DETACHED, wrong, figures)


def micro_batches(runs: Runs, truth: Truth) -> str | None:
    """What shows that rows of one backward pass do not meet those of another: it matters which rows are in which."""
    local = truth.local
    steps, (first, *between, last) = max(local.answers[0].passes.values(), default=0), local.trial.rows
    if steps < 2 or local.answers[0].drew:
        return None
    try:
        (exchanged,) = runs.measure([replace(local.trial, rows=(last, *between, first))])
    except FailureError:
        return None
    before, after = local.losses[0], exchanged.losses[0]
    if same(before, after):
        return None
    return (
        f"{steps} backward passes, and on one process the loss is {number(before)}, but {number(after)} when the "
        "batch's first and last row change places"
    )


def _stops_at_collectives(runs: Runs, truth: Truth, wrong: list[str]) -> bool:
    """Whether the gradient is what differences find with everything fixed that collectives give."""
    if truth.step is None:
        return False
    try:
        within = derivatives_within(runs, truth, truth.local.trial, wrong, truth.step)
    except FailureError:
        return False
    return all(_agrees(truth, inner(truth.local.gradients, truth.directions[g]), within[g]) for g in wrong)


def _is_last(local: Measured, wrong: list[str], truth: Truth) -> bool:
    """Whether the parameters hold what the last of several backward passes brought."""
    answer = local.answers[0]
    names = [name for g in wrong for name in truth.groups[g]]
    if max((answer.passes.get(name, 0) for name in names), default=0) < 2:
        return False
    last, total = (compare(local.gradients, of, names, truth.total) for of in (answer.last, answer.contributed))
    return last.error <= 1e-9 and total.error > truth.tolerance


def _right_when_quiet(runs: Runs, truth: Truth, wrong: list[str]) -> bool:
    """Whether differences agree with the gradient once nothing is drawn."""
    assert truth.step is not None
    for quiet in (("dropout",), ("all",)):
        trial = replace(truth.local.trial, quiet=quiet)
        try:
            (measured,) = runs.measure([trial])
            if measured.answers[0].drew:
                continue
            found = derivatives(runs, truth, trial, wrong, truth.step)
        except FailureError:
            return False
        of = measured.gradients
        return all(_agrees(truth, inner(of, truth.directions[g]), found[g].item()) for g in wrong)
    return False


def _agrees(truth: Truth, gradient: float, difference: float) -> bool:
    return abs(gradient - difference) <= truth.close * max(abs(difference), 1e-6 * truth.total)
