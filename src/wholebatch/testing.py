"""For tests: run a function on W real processes, and assert that a training step's gradient is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._launch.processes import RankError, RankTimeoutError, preload, run_ranks
from .auditing.driver import audit

__all__ = ["RankError", "RankTimeoutError", "assert_exact", "preload", "run_ranks"]


def assert_exact(
    problem: Any,  # as in `audit`
    ranks: Sequence[int] = (1, 2, 3),
    **options: Any,  # of several types, as `audit` checks them
) -> None:
    """Assert that the gradient that W ranks end with is that of one process on the whole batch.

    Args:
        problem: as in :func:`wholebatch.audit`.
        ranks: as in :func:`wholebatch.audit`.
        **options: as in :func:`wholebatch.audit`.

    Raises:
        AssertionError: if it is not; the message is the whole report, with causes and fixes.
        ValueError: as in :func:`wholebatch.audit`.

    >>> import wholebatch as wb
    >>> def test_my_training_step():
    ...     wb.testing.assert_exact("my_project.audits:clip", ranks=(1, 2, 4))
    """
    __tracebackhide__ = True
    report = audit(problem, ranks, **options)
    if not report.exact:
        raise AssertionError(str(report))
