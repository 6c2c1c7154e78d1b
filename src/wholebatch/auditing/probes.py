"""Batches on which a mistake of one kind has no effect: if the ranks' losses are right on them, that was the mistake.

Each probe returns None where the loss cannot be computed of such a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, TypeVar

from .._base.user_error import UserError
from .compare import same
from .runs import Baseline, FailureError, Measured, Runs

_MOST_RANKS = 3  # whose orders are tried
_Probe = TypeVar("_Probe", bound=Callable[..., Any])


def _catch_failure(probe: _Probe) -> _Probe:
    def probed(self: Probes) -> Any:
        try:
            return probe(self)
        except (FailureError, UserError):
            return None

    probed.__doc__ = probe.__doc__
    return probed  # type: ignore[return-value]  # the same, and None


class Probes:
    """The probes of one measured split."""

    def __init__(self, runs: Runs, baseline: Baseline, measured: Measured) -> None:
        self._runs, self._baseline, self._measured = runs, baseline, measured
        self._ranks, self._counts, self._rows = measured.ranks, measured.trial.counts, measured.trial.rows

    @_catch_failure
    def constant(self) -> bool | None:
        """Return whether losses are right with one row everywhere, where only a wrong number of terms changes them.

        None if L of one rank's rows equals L of all, so that the number of terms does not show.
        """
        rows = self._rows
        losses, true = self._losses_of([(rows[0],) * len(rows)])
        fewer = replace(self._baseline.reference.trial, counts=(self._counts[0],), rows=(rows[0],) * self._counts[0])
        (local,) = self._runs.measure([fewer])
        return None if same(local.losses[0], true[0]) else same(self._measured.loss_weight * sum(losses[0]), true[0])

    @_catch_failure
    def repeated(self) -> bool | None:
        """Return whether losses are right with the same rows on all ranks.

        Two ranks are tried as well, on which alternating rows do not fall on their positions by chance.
        """
        n = self._counts[0]
        if len(set(self._counts)) > 1:
            return False
        for ranks in {2, self._ranks}:
            rows = self._rows[:n] * ranks
            split = replace(self._measured.trial, counts=(n,) * ranks, rows=rows)
            whole = replace(self._baseline.reference.trial, counts=(len(rows),), rows=rows)
            (measured,), (true,) = self._runs.measure([split]), self._runs.measure([whole])
            if not same(measured.mean, true.losses[0]):
                return False
        return True

    @_catch_failure
    def order(self) -> tuple[str, str] | None:
        """Return an input, and the order of its ranks' parts that gives the same loss on one process."""
        if len(set(self._counts)) > 1 or self._ranks > _MOST_RANKS or not self._measured.replicated:
            return None
        n = self._counts[0]
        for name in self._measured.inputs:
            for order in permutations(range(self._ranks)):
                mixed = tuple(row for rank in order for row in self._rows[rank * n : (rank + 1) * n])
                if mixed == self._rows:
                    continue
                (whole,) = self._runs.measure([replace(self._baseline.reference.trial, but=(name, mixed))])
                if same(whole.losses[0], self._measured.mean):
                    return name, ", ".join(map(str, order))
        return None

    @_catch_failure
    def rotated(self) -> list[bool] | None:
        """Return for each rank whether its losses average to L while the parts of the batch rotate over ranks."""
        if len(set(self._counts)) > 1:
            return []
        rows, n, true = self._rows, self._counts[0], self._baseline.reference.losses[0]
        losses, _ = self._losses_of([rows[k * n :] + rows[: k * n] for k in range(self._ranks)])
        weight = self._measured.loss_weight
        return [same(weight * sum(of_rank), true) for of_rank in zip(*losses, strict=True)]

    def positives_at_rank_0(self) -> bool:
        """Return whether rank 2 of 3, with rank 0's rows, has rank 0's loss: its positives are rank 0's rows, then."""
        rows, n = self._rows, self._counts[0]
        trial = replace(self._measured.trial, counts=(n, n, n), rows=rows[: 2 * n] + rows[:n])
        (measured,) = self._runs.measure([trial])
        return same(measured.losses[0], measured.losses[2])

    def _losses_of(self, batches: Sequence[tuple[int, ...]]) -> tuple[list[list[float]], list[float]]:
        """Return each rank's losses of these rows, and one process's."""
        split = [replace(self._measured.trial, rows=rows) for rows in batches]
        whole = [replace(self._baseline.reference.trial, rows=rows) for rows in batches]
        return [m.losses for m in self._runs.measure(split)], [m.losses[0] for m in self._runs.measure(whole)]
