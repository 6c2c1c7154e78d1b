"""Measure by finite differences how each rank's loss depends on each rank's rows, without any backward pass.

The parameters of one group are moved on one rank, r, by h and by -h along a unit vector v, and every rank's loss
is computed:

    D_sr = [l_s(theta_r + h v) - l_s(theta_r - h v)] / 2h          the part of dl_s/dtheta . v through r's rows

An engine that averages should end with (1/W) sum_sr D_sr = <gradient of the ranks' mean loss, v>. If the parameters are
moved on all ranks at once while collectives return what they returned before (`observe.Replaying`), the differences
are the result of a backward pass that stops at every collective. Comparing the two shows which terms a backward pass
leaves out, without reading its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .measure import Perturbation, Trial
from .runs import Baseline

_STEPS = {torch.float64: (1e-6, 1e-5, 1e-4), torch.float32: (3e-3, 1e-2, 3e-2)}
CLOSE = {torch.float64: 1e-3, torch.float32: 5e-2}


def derivatives(baseline: Baseline, trial: Trial, groups: Sequence[str]) -> dict[str, Tensor]:
    """Return D of each group: (W losses, W ranks whose rows are moved)."""
    assert baseline.step is not None
    ranks = range(len(trial.counts))
    moves = [(group, rank, baseline.step) for group in groups for rank in ranks]
    columns = iter(_differences(baseline, trial, moves))
    return {group: torch.stack([next(columns) for _ in ranks], 1) for group in groups}


def derivatives_within(baseline: Baseline, trial: Trial, groups: Sequence[str]) -> dict[str, float]:
    """Return for each group the ranks' mean of dl_s/dtheta . v while collectives return fixed results."""
    assert baseline.step is not None
    columns = _differences(baseline, trial, [(group, None, baseline.step) for group in groups])
    return {group: column.mean().item() for group, column in zip(groups, columns, strict=True)}


def _differences(baseline: Baseline, trial: Trial, moves: Sequence[tuple[str, int | None, float]]) -> list[Tensor]:
    """Return each rank's difference quotient, (W,), for each move of a group on one rank, or on all, by a step."""
    trials = [
        replace(trial, perturbation=Perturbation(baseline.directions[group], rank, by))
        for group, rank, step in moves
        for by in (step, -step)
    ]
    losses = [torch.tensor(measured.losses, dtype=torch.float64) for measured in baseline.runs.measure(trials)]
    quotients = zip(moves, losses[::2], losses[1::2], strict=True)
    return [(plus - minus) / (2 * step) for (_, _, step), plus, minus in quotients]


def with_slopes(baseline: Baseline) -> Baseline:
    """Return the baseline with the first step that agrees with the next larger one, its slopes and their error.

    A loss may compute in float32 whatever it is given; then larger, less exact steps are tried. The step is None if no
    two agree.
    """
    for dtype in dict.fromkeys((baseline.runs.dtype, torch.float32)):
        steps, close = _STEPS[dtype], CLOSE[dtype]
        moves = [(group, 0, step) for step in steps for group in baseline.groups]
        differences = iter(_differences(baseline, baseline.measured.trial, moves))
        per_step = [{group: next(differences).item() for group in baseline.groups} for _ in steps]
        for step, slopes, other in zip(steps, per_step, per_step[1:], strict=False):
            size = max(map(abs, slopes.values()))
            if all(abs(other[g] - slopes[g]) <= close / 4 * max(abs(slopes[g]), 1e-3 * size) for g in slopes):
                return replace(baseline, step=step, close=close, slopes=slopes)
    return baseline
