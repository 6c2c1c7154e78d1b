"""Measure by finite differences how each rank's loss depends on each rank's rows, without any backward pass.

The parameters of one group are moved on one rank, r, by h and by -h along a unit vector v, and every rank's loss
is computed:

    D_sr = [l_s(theta_r + h v) - l_s(theta_r - h v)] / 2h          the part of dl_s/dtheta . v through r's rows

An engine that averages should end with (1/W) sum_sr D_sr = <gradient of the ranks' mean loss, v>. If the parameters are
moved on all ranks at once while collectives return what they returned before (`replay_collectives`), the differences
are the result of a backward pass that stops at every collective. Comparing the two shows which terms a backward pass
leaves out, without reading its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .runs import Baseline, Runs
from .trial import Perturbation, Trial

STEPS = {torch.float64: (1e-6, 1e-5, 1e-4), torch.float32: (3e-3, 1e-2, 3e-2)}
CLOSE = {torch.float64: 1e-3, torch.float32: 5e-2}


def derivatives(runs: Runs, baseline: Baseline, trial: Trial, groups: Sequence[str], step: float) -> dict[str, Tensor]:
    """Return D of each group: (W losses, W ranks whose rows are moved)."""
    return _derivatives(runs, baseline, trial, groups, [step])[0]


def _derivatives(
    runs: Runs, baseline: Baseline, trial: Trial, groups: Sequence[str], steps: Sequence[float]
) -> list[dict[str, Tensor]]:
    """Return the same for each of several steps."""
    ranks = range(len(trial.counts))
    perturbations = [
        Perturbation(g, rank, by) for step in steps for g in groups for rank in ranks for by in (step, -step)
    ]
    trials = [replace(trial, perturbation=perturbation) for perturbation in perturbations]
    of_trials = iter(runs.answers(trials, {group: baseline.directions[group] for group in groups}))
    per_step = []
    for step in steps:
        per_group = {}
        for group in groups:
            columns = []
            for _ in ranks:
                plus, minus = (torch.tensor([a.loss for a in next(of_trials)], dtype=torch.float64) for _ in range(2))
                columns.append((plus - minus) / (2 * step))
            per_group[group] = torch.stack(columns, 1)
        per_step.append(per_group)
    return per_step


def derivatives_within(
    runs: Runs, baseline: Baseline, trial: Trial, groups: Sequence[str], step: float
) -> dict[str, float]:
    """Return for each group the ranks' mean of dl_s/dtheta . v while collectives return fixed results."""
    trials = [replace(trial, perturbation=Perturbation(group, None, by)) for group in groups for by in (step, -step)]
    of_trials = iter(runs.answers(trials, {group: baseline.directions[group] for group in groups}))
    slopes = {}
    for group in groups:
        plus, minus = (sum(answer.loss for answer in next(of_trials)) / len(trial.counts) for _ in range(2))
        slopes[group] = (plus - minus) / (2 * step)
    return slopes


def smooth_step(runs: Runs, baseline: Baseline, trial: Trial) -> tuple[float | None, dict[str, float], float]:
    """Return the first step that agrees with the next larger one, its derivatives, and their relative error.

    A loss may compute in float32 whatever it is given; then larger, less exact steps are tried. The step is None if no
    two agree.
    """
    for dtype in dict.fromkeys((runs.dtype, torch.float32)):
        steps, close = STEPS[dtype], CLOSE[dtype]
        per_step = [
            {group: d.item() for group, d in of_step.items()}
            for of_step in _derivatives(runs, baseline, trial, [*baseline.groups], steps)
        ]
        for step, slopes, other in zip(steps, per_step, per_step[1:], strict=False):
            size = max(map(abs, slopes.values()))
            if all(abs(other[g] - slopes[g]) <= close / 4 * max(abs(slopes[g]), 1e-3 * size) for g in slopes):
                return step, slopes, close
    return None, {}, CLOSE[runs.dtype]
