"""Whose loss depends on whose rows: measured by finite differences of losses, no gradient involved.

The parameters of one group are moved on one rank, r, by h and by -h along a unit vector v, and every rank's loss
is computed:

    D_sr = [l_s(theta_r + h v) - l_s(theta_r - h v)] / 2h          the part of dl_s/dtheta . v through r's rows

An engine that averages should end with (1/W) sum_sr D_sr = <gradient of the ranks' mean loss, v>. With the same
moved on all ranks at once, but what collectives give held fixed (`frozen`), differences are of what a backward pass
finds that stops at every collective. So one can see what a backward pass leaves out without reading its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .measure import Nudge, Trial
from .runs import Runs, Truth

STEPS = {torch.float64: (1e-6, 1e-5, 1e-4), torch.float32: (3e-3, 1e-2, 3e-2)}
CLOSE = {torch.float64: 1e-3, torch.float32: 5e-2}


def derivatives(runs: Runs, truth: Truth, trial: Trial, groups: Sequence[str], step: float) -> dict[str, Tensor]:
    """D of each group, (W losses, W ranks whose rows are moved)."""
    return _derivatives(runs, truth, trial, groups, [step])[0]


def _derivatives(
    runs: Runs, truth: Truth, trial: Trial, groups: Sequence[str], steps: Sequence[float]
) -> list[dict[str, Tensor]]:
    """With each of several steps."""
    ranks = range(len(trial.counts))
    nudges = [Nudge(g, rank, by) for step in steps for g in groups for rank in ranks for by in (step, -step)]
    trials = [replace(trial, nudge=nudge) for nudge in nudges]
    of_trials = iter(runs.answers(trials, {group: truth.directions[group] for group in groups}))
    made = []
    for step in steps:
        found = {}
        for group in groups:
            columns = []
            for _ in ranks:
                plus, minus = (torch.tensor([a.loss for a in next(of_trials)], dtype=torch.float64) for _ in range(2))
                columns.append((plus - minus) / (2 * step))
            found[group] = torch.stack(columns, 1)
        made.append(found)
    return made


def derivatives_within(runs: Runs, truth: Truth, trial: Trial, groups: Sequence[str], step: float) -> dict[str, float]:
    """Of each group, the ranks' mean of dl_s/dtheta . v with everything fixed that collectives give."""
    trials = [replace(trial, nudge=Nudge(group, None, by)) for group in groups for by in (step, -step)]
    of_trials = iter(runs.answers(trials, {group: truth.directions[group] for group in groups}))
    made = {}
    for group in groups:
        plus, minus = (sum(answer.loss for answer in next(of_trials)) / len(trial.counts) for _ in range(2))
        made[group] = (plus - minus) / (2 * step)
    return made


def smooth_step(runs: Runs, truth: Truth, trial: Trial) -> tuple[float | None, dict[str, float], float]:
    """The first step of which the next one finds the same derivatives, these, and how close they are to others.

    A loss may be computed in float32 whatever it is given: then larger steps, which are less exact. None: there is no
    step that does.
    """
    for dtype in dict.fromkeys((runs.dtype, torch.float32)):
        steps, close = STEPS[dtype], CLOSE[dtype]
        found = [
            {group: d.item() for group, d in of_step.items()}
            for of_step in _derivatives(runs, truth, trial, [*truth.groups], steps)
        ]
        for step, one, other in zip(steps, found, found[1:], strict=False):
            size = max(map(abs, one.values()))
            if all(abs(other[g] - one[g]) <= close / 4 * max(abs(one[g]), 1e-3 * size) for g in one):
                return step, one, close
    return None, {}, CLOSE[runs.dtype]
