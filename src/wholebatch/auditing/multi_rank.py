"""Find out why the gradient of several ranks differs from that of one process.

Each of three questions is answered by a measurement:

    does the backward pass fit the forward pass?   M = <gradient, v> against sum_sr D_sr / W of `differences`
    does the forward pass compute L?               the ranks' losses against L, on this batch and on the batches of
                                                   probes, on which a mistake of one kind has no effect
    which rows count?                              one process's gradient on a batch that lacks or repeats some
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, TypeVar

from .._base.user_error import UserError
from .._launch.processes import RankError
from ..partition import Partition
from . import causes
from .causes import Cause
from .compare import Comparison, compare, inner, number, same, wrong_groups
from .differences import derivatives, derivatives_within
from .one_process import micro_batches
from .report import Finding
from .runs import Baseline, Measured

_MOST_RANKS = 3  # whose orders are tried
_Probe = TypeVar("_Probe", bound=Callable[..., Any])


def diagnose(baseline: Baseline, measured: Measured, compared: dict[str, Comparison]) -> list[Finding]:
    """Return the causes of wrong groups."""
    return _Case(baseline, measured, compared).findings()


def _none_if_it_fails(probe: _Probe) -> _Probe:
    @functools.wraps(probe)
    def probed(case: _Case) -> Any:
        try:
            return probe(case)
        except (RankError, UserError):
            return None

    return probed  # type: ignore[return-value]  # the same, and None


class _Case:
    """One split whose gradient is wrong."""

    def __init__(self, baseline: Baseline, measured: Measured, compared: dict[str, Comparison]) -> None:
        self.baseline, self.measured, self.compared = baseline, measured, compared
        self.ranks, self.counts, self.rows = measured.ranks, measured.trial.counts, measured.trial.rows
        self.wrong = wrong_groups(compared, baseline.tolerance)
        self.true_loss = baseline.reference.losses[0]
        self.loss_weight, self.mean, self.replicated = measured.loss_weight, measured.mean, measured.replicated

    def findings(self) -> list[Finding]:
        """Return the first explanation that holds."""
        different = self._differing_groups()
        if different:
            return [self._finding(causes.NOT_REDUCED, different, "rank 0's and another rank's differ after the step")]
        without = [g for g in self.wrong if self.compared[g].verdict(self.baseline.tolerance) == "no gradient"]
        if not without or without == [*self.baseline.groups]:
            return self._explain()
        self.wrong = [group for group in self.wrong if group not in without]
        missing = self._finding(causes.NO_GRADIENT, without, "0 or None on all ranks")
        return [missing, *(self._explain() if self.wrong else [])]

    def _differing_groups(self) -> list[str]:
        """Return the groups whose gradients differ between ranks."""
        first, *others = [answer.gradients for answer in self.measured.answers if answer.gradients]
        of_others = [self.baseline.compare(other, first) for other in others]
        return [
            group
            for group in self.baseline.groups
            if any(compared[group].error > self.baseline.tolerance for compared in of_others)
        ]

    def _explain(self) -> list[Finding]:
        findings = self._batch_statistics()
        if not findings and len(set(self.counts)) > 1:
            findings = self._unequal_ranks()
        if not findings and self.baseline.detached:
            findings = self._explain_ratios() if same(self.mean, self.true_loss) else self._explain_values(alone=False)
        elif not findings and self.baseline.step is not None:
            findings = self._explain_differences()
        return findings or [self._finding(causes.UNKNOWN, self.wrong, self._figures())]

    def _finding(self, cause: Cause, groups: Sequence[str], evidence: str) -> Finding:
        return Finding(cause, self.counts, tuple(groups), evidence)

    def _figures(self) -> str:
        return ", ".join(
            f"{group}: ratio {number(self.compared[group].ratio)}, cosine {number(self.compared[group].cosine)}"
            for group in self.wrong
        )

    # Modules in evaluation mode.

    def _batch_statistics(self) -> list[Finding]:
        if not self.baseline.facts.has_batch_norm:
            return []
        eval_modules = (*self.baseline.eval_modules, "batch_norm")
        try:
            (whole,) = self.baseline.runs.measure([replace(self.baseline.measured.trial, eval_modules=eval_modules)])
            (split,) = self.baseline.runs.measure([replace(self.measured.trial, eval_modules=eval_modules)])
        except RankError:
            return []
        names = [name for group in self.baseline.groups.values() for name in group]
        if compare(split.gradients, whole.gradients, names, self.baseline.total).error > self.baseline.tolerance:
            return []
        evidence = "with BatchNorm in evaluation mode the gradient is that of one process"
        return [self._finding(causes.BATCH_STATISTICS, self.wrong, evidence)]

    # One process's gradient on a batch with other rows.

    def _unequal_ranks(self) -> list[Finding]:
        """Explain a wrong gradient of ranks with different numbers of rows."""
        total = sum(self.counts)
        weighted = sum(n * x for n, x in zip(self.counts, self.measured.losses, strict=True)) / total
        if not self.replicated and same(weighted, self.true_loss) and not same(self.mean, self.true_loss):
            evidence = (
                f"the losses of the ranks have the mean {number(self.mean)}, and L, "
                f"{number(self.true_loss)}, if each is weighted by its rows"
            )
            return [self._finding(causes.MEAN_OF_MEANS, self.wrong, evidence)]
        rows, least, most = range(total), min(self.counts), max(self.counts)
        local = [list(rows[Partition(self.counts).rows(rank)]) for rank in range(self.ranks)]
        candidates = [
            (causes.ROWS_DROPPED, [part[:least] for part in local], f"only the first {least} rows of each rank")
        ]
        if least:
            candidates += [
                (causes.ROWS_REPEATED, [part + part[-1:] * (most - len(part)) for part in local], "last rows repeated"),
                (causes.ROWS_REPEATED, [(part * most)[:most] for part in local], "rows repeated from the first"),
            ]
        for cause, batch, rows_used in candidates:
            flat = tuple(row for part in batch for row in part)
            trial = replace(self.baseline.reference.trial, counts=(len(flat),), rows=flat)
            try:
                (run,) = self.baseline.runs.measure([trial])
            except RankError:
                continue
            names = [name for group in self.wrong for name in self.baseline.groups[group]]
            if (
                compare(self.measured.gradients, run.gradients, names, self.baseline.total).off_axis
                <= self.baseline.tolerance
            ):
                evidence = f"the gradient is that of one process on a batch of {rows_used}"
                return [self._finding(cause, self.wrong, evidence)]
        return []

    # Finite differences of losses.

    def _explain_ratios(self) -> list[Finding]:
        """Explain by ratios alone, where something is detached and the ranks' loss is L."""
        groups = [g for g, c in self.compared.items() if not math.isnan(c.ratio)]
        for factor, everything in ((1 / self.ranks, causes.EVERYTHING_OVER_W), (self.ranks, causes.EVERYTHING_TIMES_W)):
            if not self._all_ratios(factor):
                continue
            if set(self.wrong) == set(groups) and self.baseline.scalars:
                return [self._finding(everything, self.wrong, f"{self._values()}: {self._ratios()}")]
            if factor < 1 and set(self.wrong) == {g for g in groups if g in self.baseline.encoders}:
                return [
                    self._finding(causes.GATHER_WITHOUT_GRADIENT, self.wrong, f"{self._values()}: {self._ratios()}")
                ]
        return []

    def _explain_differences(self) -> list[Finding]:
        parts = {
            g for g, names in self.baseline.groups.items() if any(name in self.baseline.facts.sharded for name in names)
        }
        encoders = [g for g in self.baseline.encoders if g in self.wrong and g not in parts]
        scalars = [g for g in self.baseline.scalars if g in self.wrong]
        if encoders:
            try:
                return self._explain_encoders(encoders)
            except RankError:
                return []
        return self._explain_scalars(scalars) if scalars else []

    def _explain_encoders(self, wrong: list[str]) -> list[Finding]:
        w, trial = self.ranks, self.measured.trial
        of_groups = derivatives(self.baseline, trial, wrong)
        held = {g: inner(self.measured.gradients, self.baseline.directions[g]) for g in wrong}
        whole = {g: self.loss_weight * of_groups[g].sum().item() for g in wrong}
        local = {g: self.loss_weight * of_groups[g].diagonal().sum().item() for g in wrong}
        alone = all(self._close(whole[g], local[g]) for g in wrong)

        def holds(expected: dict[str, float]) -> bool:
            return all(self._close(held[g], expected[g]) for g in wrong)

        everything = set(self.wrong) == {g for g, c in self.compared.items() if not math.isnan(c.ratio)}
        uniform: list[Finding] = []
        for factor, cause in ((w, causes.EVERYTHING_TIMES_W), (1 / w, causes.EVERYTHING_OVER_W)):
            if everything and self._all_ratios(factor) and holds(whole):
                uniform = [self._finding(cause, self.wrong, f"{self._values()}: {self._ratios()}")]
        if uniform and self.baseline.scalars:  # without any, a gather may be the cause
            return uniform
        if not alone:
            within = derivatives_within(self.baseline, trial, wrong)
            within = {g: w * self.loss_weight * within[g] for g in wrong}
            through = {g: whole[g] - within[g] for g in wrong}
            if holds(local):  # rows travel in messages, which are not replayed
                within, through = local, {g: whole[g] - local[g] for g in wrong}
            most = max(wrong, key=lambda g: abs(through[g]))
            evidence = (
                f"along a direction in {most} the ranks' loss changes by {number(whole[most])}, "
                f"{number(through[most])} of it through rows that others receive; the gradient has {number(held[most])}"
            )
            if holds(within):
                cause = causes.GATHER_WITHOUT_GRADIENT if self.replicated else causes.KEY_SIDE_MISSING
                return [self._finding(cause, wrong, f"{evidence}: that part is missing")]
            for factor, cause in ((1 / w, causes.GATHER_AVERAGES), (w, causes.GATHER_TIMES_W)):
                if holds({g: within[g] + factor * through[g] for g in wrong}):
                    return [self._finding(cause, wrong, f"{evidence}: that part is multiplied by {number(factor)}")]
        return uniform or (self._explain_values(alone=alone) if holds(whole) else [])

    def _explain_scalars(self, wrong: list[str]) -> list[Finding]:
        """Explain wrong parameters of the loss where encoders are right."""
        first = [self.baseline.groups[g][0] for g in wrong]
        passes = {answer.passes.get(name, 0) for answer in self.measured.answers for name in first}
        steps = passes.pop() if len(passes) == 1 else 1
        for cause, factor in (
            (causes.SCALE_TIMES_STEPS, steps),
            (causes.SCALE_TIMES_W, self.ranks),
            (causes.SCALE_OVER_W, 1 / self.ranks),
        ):
            if factor != 1 and all(self._is_ratio(g, factor) for g in wrong):
                evidence = f"{self._ratios(wrong)}, and encoders exact"
                if cause is causes.SCALE_TIMES_STEPS:
                    evidence += f"; {steps} backward passes in a step"
                return [self._finding(cause, wrong, evidence)]
        return []

    def _explain_values(self, *, alone: bool) -> list[Finding]:
        """Explain a forward pass that computes another loss than L, where the backward pass fits it."""
        values = self._values()
        if alone and not self.replicated:
            evidence = f"{values}; no rank's loss changes with how another rank's rows are encoded"
            return [self._finding(causes.NOT_GATHERED, self.wrong, evidence)]
        changed = micro_batches(self.baseline)
        if changed is not None:
            return [self._finding(causes.MICRO_BATCHES, self.wrong, f"{values}; {changed}")]
        constant, repeated, rotated = self._right_if_constant(), self._right_if_repeated(), self._right_if_rotated()
        if constant and repeated and rotated and rotated[0] and not all(rotated):
            evidence = f"{values}; rank 0's is right with any rows, and all are right where all have rank 0's rows"
            cause = causes.LABELS_NOT_OFFSET if self._positives_at_rank_0() else causes.RANK_ORDER_MIXED
            return [self._finding(cause, self.wrong, evidence)]
        order = self._order()
        if order is not None:
            evidence = f"{values}; it is the loss of a batch whose {order[0]} come from ranks {order[1]}, in this order"
            return [self._finding(causes.RANK_ORDER_MIXED, self.wrong, evidence)]
        if repeated:
            return [self._finding(causes.LOCAL_STATISTICS, self.wrong, f"{values}; L where all have the same rows")]
        if constant and self.replicated:
            evidence = f"{values}; with one row everywhere all are L: as many terms as L has, of other rows"
            return [self._finding(causes.RANK_ORDER_MIXED, self.wrong, evidence)]
        evidence = f"{values}; the gradient is that of the ranks' mean loss"
        return [self._finding(causes.LOSS_DIFFERS, self.wrong, evidence)]

    # Batches on which a mistake of one kind has no effect: if the losses are right on them, that was the mistake.
    # A result is None where the loss cannot be computed of such a batch.

    @_none_if_it_fails
    def _right_if_constant(self) -> bool | None:
        """Return whether losses are right with one row everywhere, where only a wrong number of terms changes them.

        None if L of one rank's rows equals L of all, so that the number of terms does not show.
        """
        rows = self.rows
        losses, true = self._losses_of([(rows[0],) * len(rows)])
        fewer = replace(self.baseline.reference.trial, counts=(self.counts[0],), rows=(rows[0],) * self.counts[0])
        (local,) = self.baseline.runs.measure([fewer])
        return None if same(local.losses[0], true[0]) else same(self.loss_weight * sum(losses[0]), true[0])

    @_none_if_it_fails
    def _right_if_repeated(self) -> bool | None:
        """Return whether losses are right with the same rows on all ranks.

        Two ranks are tried as well, on which alternating rows do not fall on their positions by chance.
        """
        n = self.counts[0]
        if len(set(self.counts)) > 1:
            return False
        for ranks in {2, self.ranks}:
            rows = self.rows[:n] * ranks
            split = replace(self.measured.trial, counts=(n,) * ranks, rows=rows)
            whole = replace(self.baseline.reference.trial, counts=(len(rows),), rows=rows)
            (measured,), (true,) = self.baseline.runs.measure([split]), self.baseline.runs.measure([whole])
            if not same(measured.mean, true.losses[0]):
                return False
        return True

    @_none_if_it_fails
    def _order(self) -> tuple[str, str] | None:
        """Return an input, and the order of its ranks' parts that gives the same loss on one process."""
        if len(set(self.counts)) > 1 or self.ranks > _MOST_RANKS or not self.replicated:
            return None
        n = self.counts[0]
        for name in self.measured.inputs:
            for order in permutations(range(self.ranks)):
                mixed = tuple(row for rank in order for row in self.rows[rank * n : (rank + 1) * n])
                if mixed == self.rows:
                    continue
                (whole,) = self.baseline.runs.measure([replace(self.baseline.reference.trial, but=(name, mixed))])
                if same(whole.losses[0], self.mean):
                    return name, ", ".join(map(str, order))
        return None

    @_none_if_it_fails
    def _right_if_rotated(self) -> list[bool] | None:
        """Return for each rank whether its losses average to L while the parts of the batch rotate over ranks."""
        if len(set(self.counts)) > 1:
            return []
        rows, n, true = self.rows, self.counts[0], self.true_loss
        losses, _ = self._losses_of([rows[k * n :] + rows[: k * n] for k in range(self.ranks)])
        weight = self.loss_weight
        return [same(weight * sum(of_rank), true) for of_rank in zip(*losses, strict=True)]

    def _positives_at_rank_0(self) -> bool:
        """Return whether rank 2 of 3, with rank 0's rows, has rank 0's loss: its positives are rank 0's rows, then."""
        rows, n = self.rows, self.counts[0]
        trial = replace(self.measured.trial, counts=(n, n, n), rows=rows[: 2 * n] + rows[:n])
        (measured,) = self.baseline.runs.measure([trial])
        return same(measured.losses[0], measured.losses[2])

    def _losses_of(self, batches: Sequence[tuple[int, ...]]) -> tuple[list[list[float]], list[float]]:
        """Return each rank's losses of these rows, and one process's."""
        runs = self.baseline.runs
        split = runs.measure([replace(self.measured.trial, rows=rows) for rows in batches])
        whole = runs.measure([replace(self.baseline.reference.trial, rows=rows) for rows in batches])
        return [measured.losses for measured in split], [measured.losses[0] for measured in whole]

    # Comparisons and their text.

    def _close(self, a: float, b: float) -> bool:
        return abs(a - b) <= self.baseline.close * max(abs(a), abs(b)) + 1e-7 * self.baseline.total

    def _all_ratios(self, factor: float) -> bool:
        return all(self._is_ratio(g, factor) for g in self.wrong)

    def _is_ratio(self, group: str, factor: float) -> bool:
        return abs(self.compared[group].ratio / factor - 1) < 10 * self.baseline.tolerance

    def _ratios(self, groups: Sequence[str] | None = None) -> str:
        return ", ".join(f"{g} x {number(self.compared[g].ratio)}" for g in groups or self.baseline.groups)

    def _values(self) -> str:
        return f"losses {' and '.join(map(number, self.measured.losses))}, L = {number(self.true_loss)}"
