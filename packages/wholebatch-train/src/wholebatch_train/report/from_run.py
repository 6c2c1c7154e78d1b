"""The report of a run, report.html: its contents from the configuration, the metrics and the results of the task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wholebatch.app import amount, duration

from ..config import DEFAULTS, GLYPHS, TrainConfig, names_of, value_of
from ..run.record import Schedule, Start
from ..tasks.task import Task
from .page import Chart, Fact, Line, Report, Setting, Table

Metrics = Sequence[Mapping[str, Any]]
_RUN_ONLY = ("run_folder", "resume", "until_step")  # of a start, not of the numbers


def report_of_run(
    config: TrainConfig,
    task: Task,
    figures: Mapping[str, Any],
    metrics: Metrics,
    starts: Sequence[Start],
    *,
    folder: Path,
    schedule: Schedule,
    best: Mapping[str, Any] | None = None,
) -> Report:
    title, columns, rows = task.table(figures)
    last = starts[-1]
    lines = [[f"{each.at} UTC", f"{each.step:,}", f"{each.ranks}", each.device, each.versions] for each in starts]
    steps = steps_in_words(schedule, metrics[-1]["step"], config.patience)
    return Report(
        title=f"{config.task} · {'glyphs' if config.data == 'glyphs' else Path(config.data).name}",
        subtitle=f"{folder.name}: {task.describe()}",
        facts=_facts(config, task, figures, metrics, steps, last, best),
        table=Table(title, columns, rows),
        curves=_charts(task, metrics, [start.step for start in starts if start.step]),
        evidence=task.evidence(),
        plan=last.plan,
        audit=next((start.audit for start in reversed(starts) if start.audit), ""),
        starts=Table("", ["start", "after step", "ranks", "device of rank 0", "versions"], lines),
        settings=[
            Setting(
                name.replace("_", "-"),
                steps if name == "steps" else _shown(value_of(config, name)),
                _default(config, name),
            )
            for name in names_of(config)
            if name not in _RUN_ONLY
        ],
        versions=[("", last.versions)],
    )


def steps_in_words(schedule: Schedule, last_step: int, patience: int) -> str:
    """Return the planned steps, each later decision about them, and an early end.

    >>> from ..run.record import Extension
    >>> steps_in_words(Schedule(300, 20), 300, 0)
    '300'
    >>> steps_in_words(Schedule(300, 20, (Extension(300, 600), Extension(400, 500))), 450, 3)
    '300 planned, extended after step 300 to 600, shortened after step 400 to 500, ended after step 450 by --patience 3'
    """
    phrases, steps = [f"{schedule.planned_steps:,} planned"], schedule.planned_steps
    for after, until in schedule.extensions:
        phrases.append(f"{'extended' if until > steps else 'shortened'} after step {after:,} to {until:,}")
        steps = until
    if last_step < steps:
        phrases.append(f"ended after step {last_step:,} by --patience {patience}")
    return ", ".join(phrases) if phrases[1:] else str(steps)


def _facts(
    config: TrainConfig,
    task: Task,
    figures: Mapping[str, Any],
    metrics: Metrics,
    steps: str,
    start: Start,
    best: Mapping[str, Any] | None,
) -> list[Fact]:
    last = metrics[-1]
    name, value, note = task.result(figures)
    step_note = f"of {config.batch_size:,} examples" + (
        f"; {config.steps:,} planned" if steps != str(last["step"]) else ""
    )
    facts = [Fact(name, value, note), Fact("steps", f"{last['step']:,}", step_note)]
    facts.append(Fact("loss", f"{last['loss']:.4g}", "of the last step"))
    if best is not None:
        facts.append(Fact("best validation", f"step {best['step']:,}", task.headline(best["validation"])))
    facts.append(Fact("trained for", duration(last["seconds"]), ""))
    if last.get("examples_per_second"):
        facts.append(Fact("examples / s", f"{last['examples_per_second']:,.0f}", "in the last steps"))
    memory = [amount(last[key]) for key in ("peak_cuda_bytes", "peak_rss_bytes") if last.get(key)]
    if memory:
        facts.append(
            Fact("peak memory", memory[0], f"and {memory[1]} of the host" if memory[1:] else "of the first rank")
        )
    return [*facts, Fact("ranks", f"{start.ranks}", start.device)]


def _charts(task: Task, metrics: Metrics, resumed: Sequence[int]) -> list[Chart]:
    """Return loss, validation, learning rate, gradient norm and the task's own figures of each step."""
    validated = [row for row in metrics if row.get("validation")]
    validation = [
        Line(curve.label, [row["step"] for row in validated], [curve.value(row["validation"]) for row in validated])
        for curve in task.curves
    ]
    steps = [row["step"] for row in metrics]

    def chart(title: str, key: str, lowest: float | None = None) -> Chart:
        return Chart(title, [Line(title, steps, [row.get(key) for row in metrics])], (lowest, None), marks=resumed)

    lowest = 0 if all(row["loss"] is None or row["loss"] >= 0 for row in metrics) else None
    charts = [chart("loss of the global batch", "loss", lowest)._replace(note="dashed: resumed" if resumed else "")]
    if validated:
        charts.append(Chart(task.validation_title, validation, (0, 1), marks=resumed))
    charts += [chart("learning rate", "learning_rate", 0), chart("norm of the gradient", "grad_norm", 0)]
    scale = [chart("logit scale (1 / temperature)", "logit_scale")] if "logit_scale" in metrics[-1] else []
    return charts + scale


def _default(config: TrainConfig, name: str) -> str:
    """Return the default of an option as text; some defaults depend on the data."""
    default = value_of(DEFAULTS[config.task], name)
    if name in GLYPHS and not default:
        return _shown(GLYPHS[name]) if config.data == "glyphs" else "by the data"
    return _shown(default)


def _shown(value: object) -> str:
    """Return an option's value as text; text without quotes."""
    return str(value) if isinstance(value, (str, Path)) else "none" if value is None else json.dumps(value, default=str)
