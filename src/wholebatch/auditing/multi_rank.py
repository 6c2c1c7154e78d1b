"""On several ranks: why the gradient is not that of one process.

Three questions, each answered by a measurement:

    does the backward pass fit the forward pass?   M = <gradient, v> against sum_sr D_sr / W of `differences`
    does the forward pass compute L?               the ranks' losses against L, on this batch and on batches made so
                                                   that a mistake of one kind does no harm
    which rows count?                              one process's gradient on a batch that lacks or repeats some
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import TypeVar

from .._user_error import UserError
from ..partition import Partition
from . import causes
from .causes import Cause
from .compare import Comparison, compare, inner, number, same
from .differences import derivatives, derivatives_within
from .one_process import micro_batches
from .report import Finding
from .runs import FailureError, Measured, Runs, Truth

_T = TypeVar("_T")
_FEW_RANKS = 3  # whose orders are tried


def diagnose(runs: Runs, truth: Truth, measured: Measured, compared: dict[str, Comparison]) -> list[Finding]:
    """Why groups are wrong."""
    return _Case(runs, truth, measured, compared).findings()


class _Case:
    def __init__(self, runs: Runs, truth: Truth, measured: Measured, compared: dict[str, Comparison]) -> None:
        self.runs, self.truth, self.measured, self.compared = runs, truth, measured, compared
        self.ranks, self.counts = measured.ranks, measured.trial.counts
        verdicts = {group: c.verdict(truth.tolerance) for group, c in compared.items()}
        self.wrong = [group for group, verdict in verdicts.items() if verdict != "exact"]
        self.without = [group for group in self.wrong if verdicts[group] == "no gradient"]
        self.true_loss = truth.reference.losses[0]
        self.facts, self.counted, self.mean = measured.facts, measured.counted, measured.mean
        self.replicated = all(same(x, measured.losses[0]) for x in measured.losses)

    def findings(self) -> list[Finding]:
        """The first explanation that holds."""
        apart = self._apart()
        if apart:
            return [self._finding(causes.NOT_REDUCED, apart, "rank 0's and another rank's differ after the step")]
        if self.without and self.without != [*self.truth.groups]:
            rest = [group for group in self.wrong if group not in self.without]
            found = [self._finding(causes.NO_GRADIENT, self.without, "0 or None on all ranks")]
            if not rest:
                return found
            self.wrong = rest
            return found + self._explained()
        return self._explained()

    def _apart(self) -> list[str]:
        """The groups whose gradients are not the same on all ranks."""
        of_ranks = [answer.gradients for answer in self.measured.answers if answer.gradients]
        return [
            group
            for group, names in self.truth.groups.items()
            if any(
                compare(of, of_ranks[0], names, self.truth.total).error > self.truth.tolerance for of in of_ranks[1:]
            )
        ]

    def _explained(self) -> list[Finding]:
        found = self._batch_statistics()
        if not found and len(set(self.counts)) > 1:
            found = self._unequal_ranks()
        if not found and self.truth.detached:
            found = self._by_ratios() if same(self.mean, self.true_loss) else self._of_values(alone=False)
        elif not found and self.truth.step is not None:
            found = self._by_differences()
        return found or [self._finding(causes.UNKNOWN, self.wrong, self._figures())]

    def _finding(self, cause: Cause, groups: Sequence[str], evidence: str) -> Finding:
        return Finding(cause, self.counts, tuple(groups), evidence)

    def _figures(self) -> str:
        return ", ".join(
            f"{group}: ratio {number(self.compared[group].ratio)}, cosine {number(self.compared[group].cosine)}"
            for group in self.wrong
        )

    # By evaluating modules differently.

    def _batch_statistics(self) -> list[Finding]:
        if not self.facts.has_batch_norm:
            return []
        quiet = (*self.truth.quiet, "batch_norm")
        try:
            (one,) = self.runs.measure([replace(self.truth.local.trial, quiet=quiet)])
            (here,) = self.runs.measure([replace(self.measured.trial, quiet=quiet)])
        except FailureError:
            return []
        names = [name for group in self.truth.groups.values() for name in group]
        if compare(here.gradients, one.gradients, names, self.truth.total).error > self.truth.tolerance:
            return []
        evidence = "with BatchNorm in evaluation mode the gradient is that of one process"
        return [self._finding(causes.BATCH_STATISTICS, self.wrong, evidence)]

    # By one process's gradient on a batch with other rows.

    def _unequal_ranks(self) -> list[Finding]:
        """Ranks have different numbers of rows."""
        total = sum(self.counts)
        weighted = sum(n * x for n, x in zip(self.counts, self.measured.losses, strict=True)) / total
        if not self.replicated and same(weighted, self.true_loss) and not same(self.mean, self.true_loss):
            evidence = (
                f"the losses of the ranks have the mean {number(self.mean)}, and L, "
                f"{number(self.true_loss)}, if each counts as often as it has rows"
            )
            return [self._finding(causes.UNEQUAL_RANKS_COUNT_ALIKE, self.wrong, evidence)]
        rows, least, most = range(total), min(self.counts), max(self.counts)
        local = [list(rows[Partition(self.counts).rows(rank)]) for rank in range(self.ranks)]
        supposed = [
            (causes.ROWS_DROPPED, [part[:least] for part in local], f"only the first {least} rows of each rank")
        ]
        if least:
            supposed += [
                (causes.ROWS_REPEATED, [part + part[-1:] * (most - len(part)) for part in local], "last rows repeated"),
                (causes.ROWS_REPEATED, [(part * most)[:most] for part in local], "rows repeated from the first"),
            ]
        for cause, batch, what in supposed:
            flat = tuple(row for part in batch for row in part)
            trial = replace(self.truth.reference.trial, counts=(len(flat),), rows=flat)
            try:
                (one,) = self.runs.measure([trial])
            except FailureError:
                continue
            names = [name for group in self.wrong for name in self.truth.groups[group]]
            if compare(self.measured.gradients, one.gradients, names, self.truth.total).beside <= self.truth.tolerance:
                evidence = f"the gradient is that of one process on a batch of {what}"
                return [self._finding(cause, self.wrong, evidence)]
        return []

    # By differences of losses.

    def _by_ratios(self) -> list[Finding]:
        """Where something is detached on purpose, differences say nothing; the loss that ranks compute is L."""
        groups = [g for g, c in self.compared.items() if not math.isnan(c.ratio)]
        for factor, everything in ((1 / self.ranks, causes.EVERYTHING_OVER_W), (self.ranks, causes.EVERYTHING_TIMES_W)):
            if not self._all_ratios(factor):
                continue
            if set(self.wrong) == set(groups) and self.truth.scalars:
                return [self._finding(everything, self.wrong, f"{self._values()}: {self._ratios()}")]
            if factor < 1 and set(self.wrong) == {g for g in groups if g in self.truth.encoders}:
                return [
                    self._finding(causes.GATHER_WITHOUT_GRADIENT, self.wrong, f"{self._values()}: {self._ratios()}")
                ]
        return []

    def _by_differences(self) -> list[Finding]:
        parts = {g for g, names in self.truth.groups.items() if any(name in self.facts.sharded for name in names)}
        encoders = [g for g in self.truth.encoders if g in self.wrong and g not in parts]
        scalars = [g for g in self.truth.scalars if g in self.wrong]
        if encoders:
            try:
                return self._of_encoders(encoders)
            except FailureError:
                return []
        return self._of_scalars(scalars) if scalars else []

    def _of_encoders(self, wrong: list[str]) -> list[Finding]:
        w, step, trial = self.ranks, self.truth.step, self.measured.trial
        assert step is not None
        of_groups = derivatives(self.runs, self.truth, trial, wrong, step)
        held = {g: inner(self.measured.gradients, self.truth.directions[g]) for g in wrong}
        whole = {g: self.counted * of_groups[g].sum().item() for g in wrong}
        local = {g: self.counted * of_groups[g].diagonal().sum().item() for g in wrong}
        alone = all(self._close(whole[g], local[g]) for g in wrong)

        def holds(expected: dict[str, float]) -> bool:
            return all(self._close(held[g], expected[g]) for g in wrong)

        everything = set(self.wrong) == {g for g, c in self.compared.items() if not math.isnan(c.ratio)}
        alike: list[Finding] = []
        for factor, cause in ((w, causes.EVERYTHING_TIMES_W), (1 / w, causes.EVERYTHING_OVER_W)):
            if everything and self._all_ratios(factor) and holds(whole):
                alike = [self._finding(cause, self.wrong, f"{self._values()}: {self._ratios()}")]
        if alike and self.truth.scalars:  # without any, a gather may be why
            return alike
        if not alone:
            within = derivatives_within(self.runs, self.truth, trial, wrong, step)
            within = {g: w * self.counted * within[g] for g in wrong}
            through = {g: whole[g] - within[g] for g in wrong}
            if holds(local):  # rows go from rank to rank, in messages, which are not held fixed
                within, through = local, {g: whole[g] - local[g] for g in wrong}
            most = max(wrong, key=lambda g: abs(through[g]))
            evidence = (
                f"along a direction in {most} the ranks' loss changes by {number(whole[most])}, "
                f"{number(through[most])} of it through what others receive; the gradient has {number(held[most])}"
            )
            if holds(within):
                cause = causes.GATHER_WITHOUT_GRADIENT if self.replicated else causes.KEY_SIDE_MISSING
                return [self._finding(cause, wrong, f"{evidence}: that is missing")]
            for factor, cause in ((1 / w, causes.GATHER_AVERAGES), (w, causes.GATHER_TIMES_W)):
                if holds({g: within[g] + factor * through[g] for g in wrong}):
                    return [self._finding(cause, wrong, f"{evidence}: that is multiplied by {number(factor)}")]
        return alike or (self._of_values(alone=alone) if holds(whole) else [])

    def _of_scalars(self, wrong: list[str]) -> list[Finding]:
        """Encoders are right."""
        passes = {n for a in self.measured.answers for g in wrong for n in (a.passes.get(self.truth.groups[g][0], 0),)}
        steps = passes.pop() if len(passes) == 1 else 1
        for cause, factor in (
            (causes.SCALE_TIMES_STEPS, steps),
            (causes.SCALE_TIMES_W, self.ranks),
            (causes.SCALE_OVER_W, 1 / self.ranks),
        ):
            if factor != 1 and all(abs(self.compared[g].ratio / factor - 1) < 10 * self.truth.tolerance for g in wrong):
                evidence = f"{self._ratios(wrong)}, and encoders exact"
                if cause is causes.SCALE_TIMES_STEPS:
                    evidence += f"; {steps} backward passes in a step"
                return [self._finding(cause, wrong, evidence)]
        return []

    def _of_values(self, *, alone: bool) -> list[Finding]:
        """The backward pass fits the forward pass, which computes something else than L."""
        values = self._values()
        if alone and not self.replicated:
            evidence = f"{values}; no rank's loss changes with how another rank's rows are encoded"
            return [self._finding(causes.NOT_GATHERED, self.wrong, evidence)]
        apart = micro_batches(self.runs, self.truth)
        if apart is not None:
            return [self._finding(causes.MICRO_BATCHES, self.wrong, f"{values}; {apart}")]
        constant, twice, rotated = _if_it_can(self._constant), _if_it_can(self._twice), _if_it_can(self._rotated)
        if constant and twice and rotated and rotated[0] and not all(rotated):
            evidence = (
                f"{values}; rank 0's is right, whatever rows it is given, and where all are given its rows all are"
            )
            cause = causes.LABELS_NOT_OFFSET if self._at_rank_0() else causes.RANK_ORDER_MIXED
            return [self._finding(cause, self.wrong, evidence)]
        order = _if_it_can(self._order)
        if order is not None:
            evidence = f"{values}; it is the loss of a batch whose {order[0]} come from ranks {order[1]}, in this order"
            return [self._finding(causes.RANK_ORDER_MIXED, self.wrong, evidence)]
        if twice:
            return [self._finding(causes.OWN_STATISTICS, self.wrong, f"{values}; L where all are given the same rows")]
        if constant and self.replicated:
            evidence = (
                f"{values}; with one and the same row everywhere all are L: as many terms as L has, of other rows"
            )
            return [self._finding(causes.RANK_ORDER_MIXED, self.wrong, evidence)]
        evidence = f"{values}; the gradient is that of the ranks' mean loss"
        return [self._finding(causes.ANOTHER_LOSS, self.wrong, evidence)]

    # Batches that make mistakes of one kind harmless. Each says whether the ranks' losses are then right.

    def _constant(self) -> bool | None:
        """One row everywhere: no loss can tell which is which, only how many there are; None if it cannot even that."""
        rows = self.measured.trial.rows
        losses, true = self._losses_of([(rows[0],) * len(rows)])
        fewer = replace(self.truth.reference.trial, counts=(self.counts[0],), rows=(rows[0],) * self.counts[0])
        (local,) = self.runs.measure([fewer])
        return None if same(local.losses[0], true[0]) else same(self.counted * sum(losses[0]), true[0])

    def _twice(self) -> bool:
        """The same rows on all ranks; and on two, where rows that alternate do not happen to fall on their own."""
        n = self.counts[0]
        if len(set(self.counts)) > 1:
            return False
        for ranks in {2, self.ranks}:
            rows = self.measured.trial.rows[:n] * ranks
            here = replace(self.measured.trial, counts=(n,) * ranks, rows=rows)
            one = replace(self.truth.reference.trial, counts=(len(rows),), rows=rows)
            (measured,), (true,) = self.runs.measure([here]), self.runs.measure([one])
            if not same(measured.mean, true.losses[0]):
                return False
        return True

    def _order(self) -> tuple[str, str] | None:
        """An input whose parts, in another order of ranks, give the loss that was found on one process."""
        if len(set(self.counts)) > 1 or not self.replicated or self.ranks > _FEW_RANKS:
            return None
        rows, n = self.measured.trial.rows, self.counts[0]
        for name in self.measured.inputs:
            for order in permutations(range(self.ranks)):
                mixed = tuple(row for rank in order for row in rows[rank * n : (rank + 1) * n])
                if mixed == rows:
                    continue
                (one,) = self.runs.measure([replace(self.truth.reference.trial, but=(name, mixed))])
                if same(one.losses[0], self.mean):
                    return name, ", ".join(map(str, order))
        return None

    def _rotated(self) -> list[bool]:
        """For each rank, whether its losses average to L while the parts of the batch go round."""
        if len(set(self.counts)) > 1:
            return []
        rows, n = self.measured.trial.rows, self.counts[0]
        losses, _ = self._losses_of([rows[k * n :] + rows[: k * n] for k in range(self.ranks)])
        return [same(self.counted * sum(of_rank), self.true_loss) for of_rank in zip(*losses, strict=True)]

    def _at_rank_0(self) -> bool:
        """Rank 2 of 3, given rank 0's rows, has its loss: it is not among rank 1's that its positives are sought."""
        rows, n = self.measured.trial.rows, self.counts[0]
        trial = replace(self.measured.trial, counts=(n, n, n), rows=rows[: 2 * n] + rows[:n])
        (measured,) = self.runs.measure([trial])
        return same(measured.losses[0], measured.losses[2])

    def _losses_of(self, batches: Sequence[tuple[int, ...]]) -> tuple[list[list[float]], list[float]]:
        """Of these rows, each rank's losses, and one process's."""
        here = [replace(self.measured.trial, rows=rows) for rows in batches]
        one = [replace(self.truth.reference.trial, rows=rows) for rows in batches]
        return [m.losses for m in self.runs.measure(here)], [m.losses[0] for m in self.runs.measure(one)]

    # Words.

    def _close(self, a: float, b: float) -> bool:
        return abs(a - b) <= self.truth.close * max(abs(a), abs(b)) + 1e-7 * self.truth.total

    def _all_ratios(self, factor: float) -> bool:
        return all(abs(self.compared[g].ratio / factor - 1) < 10 * self.truth.tolerance for g in self.wrong)

    def _ratios(self, groups: Sequence[str] | None = None) -> str:
        return ", ".join(f"{g} x {number(self.compared[g].ratio)}" for g in groups or self.truth.groups)

    def _values(self) -> str:
        return f"losses {' and '.join(map(number, self.measured.losses))}, L = {number(self.true_loss)}"


def _if_it_can(look: Callable[[], _T]) -> _T | None:
    """What one finds, or None where the loss cannot be computed of such a batch."""
    try:
        return look()
    except (FailureError, UserError):
        return None
