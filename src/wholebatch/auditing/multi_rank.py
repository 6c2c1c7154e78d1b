"""Find out why the gradient of several ranks differs from that of one process.

Each of three questions is answered by a measurement:

    does the backward pass fit the forward pass?   M = <gradient, v> against sum_sr D_sr / W of `differences`
    does the forward pass compute L?               the ranks' losses against L, on this batch and on the batches of
                                                   probes, on which a mistake of one kind has no effect
    which rows count?                              one process's gradient on a batch that lacks or repeats some
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

from ..partition import Partition
from . import causes
from .causes import Cause
from .compare import Comparison, inner, number, same, wrong_groups
from .differences import derivatives, derivatives_within
from .one_process import micro_batches
from .report import Finding
from .runs import Baseline, Measured, probe

_MOST_RANKS = 3  # whose orders are tried


def diagnose(baseline: Baseline, measured: Measured, compared: dict[str, Comparison]) -> list[Finding]:
    """Return the causes of wrong groups."""
    return _Case(baseline, measured, compared).findings()


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
            evidence = "rank 0's and another rank's differ after the step"
            return [self._finding(causes.NOT_REDUCED, evidence, different)]
        without = [g for g in self.wrong if self.compared[g].verdict(self.baseline.tolerance) == "no gradient"]
        if not without or without == [*self.baseline.groups]:
            return [self._explain()]
        self.wrong = [group for group in self.wrong if group not in without]
        missing = self._finding(causes.NO_GRADIENT, "0 or None on all ranks", without)
        return [missing, self._explain()] if self.wrong else [missing]

    def _differing_groups(self) -> list[str]:
        """Return the groups whose gradients differ between ranks."""
        first, *others = [answer.gradients for answer in self.measured.answers if answer.gradients]
        comparisons = [self.baseline.compare(other, first) for other in others]
        return [
            group
            for group in self.baseline.groups
            if any(compared[group].error > self.baseline.tolerance for compared in comparisons)
        ]

    def _explain(self) -> Finding:
        finding = self._batch_statistics() or self._unequal_ranks()
        if finding is None and self.baseline.detached:
            finding = self._explain_ratios() if same(self.mean, self.true_loss) else self._explain_values(alone=False)
        elif finding is None and self.baseline.step is not None:
            finding = self._explain_differences()
        return finding or self._finding(causes.UNKNOWN, self._figures())

    def _finding(self, cause: Cause, evidence: str, groups: Sequence[str] | None = None) -> Finding:
        """Return a finding about some groups, by default all whose gradient is wrong."""
        return Finding(cause, self.counts, tuple(self.wrong if groups is None else groups), evidence)

    def _figures(self) -> str:
        return ", ".join(
            f"{group}: ratio {number(self.compared[group].ratio)}, cosine {number(self.compared[group].cosine)}"
            for group in self.wrong
        )

    # Modules in evaluation mode.

    @probe
    def _batch_statistics(self) -> Finding | None:
        baseline = self.baseline
        if not baseline.facts.has_batch_norm:
            return None
        eval_modules = (*baseline.eval_modules, "batch_norm")
        whole, split = (baseline.again(m, eval_modules=eval_modules) for m in (baseline.measured, self.measured))
        compared = baseline.compare_together(split.gradients, whole.gradients, baseline.groups)
        if compared.error > baseline.tolerance:
            return None
        evidence = "with BatchNorm in evaluation mode the gradient is that of one process"
        return self._finding(causes.BATCH_STATISTICS, evidence)

    # One process's gradient on a batch with other rows.

    def _unequal_ranks(self) -> Finding | None:
        """Explain a wrong gradient of ranks with different numbers of rows."""
        if len(set(self.counts)) == 1:
            return None
        total = sum(self.counts)
        weighted = sum(n * x for n, x in zip(self.counts, self.measured.losses, strict=True)) / total
        if not self.replicated and same(weighted, self.true_loss) and not same(self.mean, self.true_loss):
            evidence = (
                f"the losses of the ranks have the mean {number(self.mean)}, and L, "
                f"{number(self.true_loss)}, if each is weighted by its rows"
            )
            return self._finding(causes.MEAN_OF_MEANS, evidence)
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
            if self._is_gradient_of(tuple(row for part in batch for row in part)):
                return self._finding(cause, f"the gradient is that of one process on a batch of {rows_used}")
        return None

    @probe
    def _is_gradient_of(self, rows: tuple[int, ...]) -> bool:
        """Return whether the gradient is that of one process on a batch of these rows, up to a factor."""
        run = self.baseline.again(self.baseline.reference, counts=(len(rows),), rows=rows)
        compared = self.baseline.compare_together(self.measured.gradients, run.gradients, self.wrong)
        return compared.off_axis <= self.baseline.tolerance

    # Finite differences of losses.

    def _comparable(self) -> set[str]:
        """Return the groups whose true gradient is not 0."""
        return {g for g, c in self.compared.items() if not math.isnan(c.ratio)}

    def _uniform(self) -> Finding | None:
        """Return a finding if all gradients are W times too large, or W times too small."""
        for factor, cause in ((self.ranks, causes.EVERYTHING_TIMES_W), (1 / self.ranks, causes.EVERYTHING_OVER_W)):
            if set(self.wrong) == self._comparable() and self._all_ratios(factor):
                return self._finding(cause, f"{self._values()}: {self._ratios()}")
        return None

    def _explain_ratios(self) -> Finding | None:
        """Explain by ratios alone, where something is detached and the ranks' loss is L."""
        if self.baseline.scalars and (uniform := self._uniform()):
            return uniform
        if set(self.wrong) == self._comparable() & {*self.baseline.encoders} and self._all_ratios(1 / self.ranks):
            return self._finding(causes.GATHER_WITHOUT_GRADIENT, f"{self._values()}: {self._ratios()}")
        return None

    @probe
    def _explain_differences(self) -> Finding | None:
        parts = {
            g for g, names in self.baseline.groups.items() if any(name in self.baseline.facts.sharded for name in names)
        }
        encoders = [g for g in self.baseline.encoders if g in self.wrong and g not in parts]
        scalars = [g for g in self.baseline.scalars if g in self.wrong]
        if encoders:
            return self._explain_encoders(encoders)
        return self._explain_scalars(scalars) if scalars else None

    def _explain_encoders(self, wrong: list[str]) -> Finding | None:
        w, trial = self.ranks, self.measured.trial
        group_derivatives = derivatives(self.baseline, trial, wrong)
        held = {g: inner(self.measured.gradients, self.baseline.directions[g]) for g in wrong}
        whole = {g: self.loss_weight * group_derivatives[g].sum().item() for g in wrong}
        local = {g: self.loss_weight * group_derivatives[g].diagonal().sum().item() for g in wrong}
        alone = all(self._close(whole[g], local[g]) for g in wrong)

        def holds(expected: dict[str, float]) -> bool:
            return all(self._close(held[g], expected[g]) for g in wrong)

        uniform = self._uniform() if holds(whole) else None
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
                return self._finding(cause, f"{evidence}: that part is missing", wrong)
            for factor, cause in ((1 / w, causes.GATHER_AVERAGES), (w, causes.GATHER_TIMES_W)):
                if holds({g: within[g] + factor * through[g] for g in wrong}):
                    return self._finding(cause, f"{evidence}: that part is multiplied by {number(factor)}", wrong)
        return uniform or (self._explain_values(alone=alone) if holds(whole) else None)

    def _explain_scalars(self, wrong: list[str]) -> Finding | None:
        """Explain wrong parameters of the loss where encoders are right."""
        steps = self.measured.passes([self.baseline.groups[g][0] for g in wrong])
        for cause, factor in (
            (causes.SCALE_TIMES_STEPS, steps),
            (causes.SCALE_TIMES_W, self.ranks),
            (causes.SCALE_OVER_W, 1 / self.ranks),
        ):
            if factor != 1 and all(self._is_ratio(g, factor) for g in wrong):
                evidence = f"{self._ratios(wrong)}, and encoders exact"
                if cause is causes.SCALE_TIMES_STEPS:
                    evidence += f"; {steps} backward passes in a step"
                return self._finding(cause, evidence, wrong)
        return None

    def _explain_values(self, *, alone: bool) -> Finding:
        """Explain a forward pass that computes another loss than L, where the backward pass fits it."""
        cause, evidence = self._wrong_loss(alone=alone)
        return self._finding(cause, f"{self._values()}; {evidence}")

    def _wrong_loss(self, *, alone: bool) -> tuple[Cause, str]:
        """Return why the ranks' loss is not L, and the evidence."""
        if alone and not self.replicated:
            return causes.NOT_GATHERED, "no rank's loss changes with how another rank's rows are encoded"
        changed = micro_batches(self.baseline)
        if changed is not None:
            return causes.MICRO_BATCHES, changed
        constant, repeated, rotated = self._right_if_constant(), self._right_if_repeated(), self._right_if_rotated()
        if constant and repeated and rotated and rotated[0] and not all(rotated):
            cause = causes.LABELS_NOT_OFFSET if self._positives_at_rank_0() else causes.RANK_ORDER_MIXED
            return cause, "rank 0's is right with any rows, and all are right where all have rank 0's rows"
        order = self._order()
        if order is not None:
            evidence = f"it is the loss of a batch whose {order[0]} come from ranks {order[1]}, in this order"
            return causes.RANK_ORDER_MIXED, evidence
        if repeated:
            return causes.LOCAL_STATISTICS, "L where all have the same rows"
        if constant and self.replicated:
            evidence = "with one row everywhere all are L: as many terms as L has, of other rows"
            return causes.RANK_ORDER_MIXED, evidence
        return causes.LOSS_DIFFERS, "the gradient is that of the ranks' mean loss"

    # Batches on which a mistake of one kind has no effect: if the losses are right on them, that was the mistake.
    # A result is None where the loss cannot be computed of such a batch.

    @probe
    def _right_if_constant(self) -> bool | None:
        """Return whether losses are right with one row everywhere, where only a wrong number of terms changes them.

        None if L of one rank's rows equals L of all, so that the number of terms does not show.
        """
        rows = self.rows[:1] * len(self.rows)
        split, true = self._split(rows), self._true_loss(rows)
        return None if same(self._true_loss(rows[: self.counts[0]]), true) else same(split.mean, true)

    @probe
    def _right_if_repeated(self) -> bool | None:
        """Return whether losses are right with the same rows on all ranks.

        Two ranks are tried as well, on which alternating rows do not fall on their positions by chance.
        """
        n = self.counts[0]
        if len(set(self.counts)) > 1:
            return False
        for ranks in {2, self.ranks}:
            rows = self.rows[:n] * ranks
            if not same(self._split(rows, (n,) * ranks).mean, self._true_loss(rows)):
                return False
        return True

    @probe
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
                whole = self.baseline.again(self.baseline.reference, but=(name, mixed))
                if same(whole.losses[0], self.mean):
                    return name, ", ".join(map(str, order))
        return None

    @probe
    def _right_if_rotated(self) -> list[bool] | None:
        """Return for each rank whether its losses average to L while the parts of the batch rotate over ranks."""
        if len(set(self.counts)) > 1:
            return []
        rows, n = self.rows, self.counts[0]
        losses = [self._split(rows[k * n :] + rows[: k * n]).losses for k in range(self.ranks)]
        return [same(self.loss_weight * sum(x), self.true_loss) for x in zip(*losses, strict=True)]

    def _positives_at_rank_0(self) -> bool:
        """Return whether rank 2 of 3, with rank 0's rows, has rank 0's loss: its positives are rank 0's rows, then."""
        rows, n = self.rows, self.counts[0]
        losses = self._split(rows[: 2 * n] + rows[:n], (n, n, n)).losses
        return same(losses[0], losses[2])

    def _split(self, rows: tuple[int, ...], counts: tuple[int, ...] | None = None) -> Measured:
        """Return the outcome of a batch of these rows on several ranks, by default with as many rows as here."""
        return self.baseline.again(self.measured, rows=rows, counts=counts or self.counts)

    def _true_loss(self, rows: tuple[int, ...]) -> float:
        """Return L of a batch of these rows."""
        return self.baseline.again(self.baseline.reference, rows=rows, counts=(len(rows),)).losses[0]

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
