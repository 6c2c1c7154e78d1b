"""Run the problem on one process: that gradient, or the reference's, is the baseline for several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .._base.user_error import UserError
from .compare import directions, grouped, norm
from .differences import CLOSE
from .runs import Baseline, FailureError, Measured, Runs
from .trial import EvalModules, Trial

_WHOLE = Trial((-1,), ())  # all rows, on one rank


def first_run(
    problem: Any, dtype: torch.dtype, seed: int, timeout_s: float
) -> tuple[Runs, Measured, Measured, list[str]]:
    """Find settings with which the problem runs on one process, and check that two runs agree.

    Returns:
        The settings, the outcomes of the problem and of its reference, and notes.

    Raises:
        UserError: if the problem fails with all settings, or if two runs differ.
    """
    first: FailureError | None = None
    for used in dict.fromkeys((dtype, torch.float32)):
        for inputs in (True, False):
            runs = Runs(problem, used, seed, timeout_s, inputs)
            try:
                measured, again, reference = runs.measure([_WHOLE, _WHOLE, replace(_WHOLE, reference=True)])
            except FailureError as failure:
                first = first or failure
                continue
            _check_deterministic(measured, again)
            notes = []
            if used != dtype:
                notes.append(f"computed in float32: in float64 it raises {first.summary if first else ''}")
            elif not inputs:
                notes.append(f"no gradients by the batch: with them it raises {first.summary if first else ''}")
            printed = measured.answers[0].printed.strip()
            if printed:
                notes.append(f"the problem's output is left out ({printed.partition(chr(10))[0]!r}, ...)")
            return runs, measured, reference, notes
        if not _is_about_dtypes(first):
            break
    raise UserError(f"on one process the problem failed: {first.summary if first else ''}") from first


def _is_about_dtypes(failure: FailureError | None) -> bool:
    return any(word in str(failure) for word in ("dtype", "Double", "float64", "scalar type"))


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


def make_baseline(
    runs: Runs, measured: Measured, reference: Measured, ranks: Sequence[int], tolerance: float
) -> tuple[Baseline, list[str]]:
    """Return the baseline for the rows that all splits have, and notes.

    Raises:
        UserError: if the rows cannot be split, or if there is nothing to compare.
    """
    rows, notes = _common_rows(measured, ranks)
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
    unit_vectors = directions(reference.gradients, groups)
    close = CLOSE[runs.dtype]
    return Baseline(measured, reference, groups, unit_vectors, total, tolerance, None, eval_modules, close), notes


def _common_rows(measured: Measured, ranks: Sequence[int]) -> tuple[int, list[str]]:
    """Return how many of the batch's rows are used, and notes."""
    rows = measured.facts.rows
    if measured.facts.uneven:
        if rows < max(ranks):
            raise UserError(f"a batch of {rows} rows cannot be split over {max(ranks)} ranks: give it more rows")
        return rows, []
    multiple = math.lcm(*ranks)
    even = rows - rows % multiple
    if not even:
        raise UserError(
            f"a batch of {rows} rows cannot be split evenly over {_join_numbers(ranks)} ranks: give it a multiple of "
            f"{multiple} rows, or uneven=True where ranks may have different numbers"
        )
    if even == rows:
        return rows, []
    return even, [f"the first {even} of {rows} rows, which can be split evenly over all numbers of ranks"]


def _modules_that_draw(runs: Runs, whole: Trial) -> tuple[EvalModules, ...]:
    """Return the modules that must be in evaluation mode so that nothing is drawn."""
    choices: tuple[tuple[EvalModules, ...], ...] = (("dropout",), ("all",))
    for eval_modules in choices:
        (measured,) = runs.measure([Trial(whole.counts, whole.rows, eval_modules=eval_modules)])
        if not measured.answers[0].drew:
            return eval_modules
    raise UserError(
        "the forward pass draws random numbers, in evaluation mode, too, and several ranks draw other numbers than one "
        "process: make them part of the batch, or audit with ranks=(1,) alone"
    )


def _join_numbers(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
