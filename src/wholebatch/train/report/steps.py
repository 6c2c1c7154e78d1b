"""The steps of a run in words: how many were planned, where this was changed, and where the run ended early."""

from __future__ import annotations

from ..run.schedule import Schedule


def steps_in_words(schedule: Schedule, made: int, patience: int) -> str:
    """Return the planned steps, each later decision about them, and an early end.

    Args:
        schedule: that of the run.
        made: the steps that were made.
        patience: `--patience`, which alone lets a run with a report end before its last step.

    >>> from ..run.schedule import Extension
    >>> steps_in_words(Schedule(300, 20), 300, 0)
    '300'
    >>> steps_in_words(Schedule(300, 20, (Extension(300, 600), Extension(400, 500))), 450, 3)
    '300 planned, extended after step 300 to 600, shortened after step 400 to 500, ended after step 450 by --patience 3'
    """
    found, steps = [f"{schedule.planned_steps:,} planned"], schedule.planned_steps
    for at, until in schedule.extensions:
        found.append(f"{'extended' if until > steps else 'shortened'} after step {at:,} to {until:,}")
        steps = until
    if made < steps:
        found.append(f"ended after step {made:,} by --patience {patience}")
    return ", ".join(found) if found[1:] else str(steps)
