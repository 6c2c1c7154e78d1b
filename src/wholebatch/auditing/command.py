"""The command `wholebatch audit` after its options are parsed: audit, print, and an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import torch

from .._base.user_error import UserError
from .._cli.display import print_table, print_text
from .._launch.processes import preload
from . import presets
from .config import AuditConfig
from .driver import audit
from .report import LEFT, SUMMARY_HEADER, Report, Summary, explanations, headline, markdown, summarize, table


def run(config: AuditConfig) -> int:
    """Audit the problem or presets, and print the reports; return 1 if a gradient is wrong.

    Raises:
        UserError: for a mistake in the problem.
    """
    sys.path.insert(0, os.getcwd())
    reports = [("", _audit_problem(config, config.problem))] if config.problem else _audit_presets(config)
    if config.json:
        values = [{"library": library, **report.to_dict()} for library, report in reports]
        print(json.dumps(values[0] if config.problem else values, indent=1))
    elif config.markdown:
        print(markdown([(library, summarize(report)) for library, report in reports]))
    elif config.problem is not None or config.setting is not None:
        for _, report in reports:
            print_report(report)
    else:
        print_summaries([(library, summarize(report)) for library, report in reports])
    return 0 if all(report.exact for _, report in reports) else 1


def _audit_presets(config: AuditConfig) -> list[tuple[str, Report]]:
    names = presets.installed() if config.preset == ("all",) else list(config.preset)
    problems = [(name, setting, problem) for name in names for setting, problem in presets.settings(name).items()]
    if config.setting is not None:
        problems = [(name, setting, problem) for name, setting, problem in problems if config.setting in setting]
        if not problems:
            raise UserError(f"no setting of {', '.join(names)} has {config.setting!r} in its name")
    preload(*(presets.module_name(name) for name in names))
    reports = []
    for name, setting, problem in problems:
        versions = " ".join(f"{package} {number}" for package, number in presets.versions(name).items())
        if not config.json and not config.markdown:
            print(f"{name}: {setting}", file=sys.stderr)
        reports.append((versions or name, _audit_problem(config, problem, setting)))
    return reports


def _audit_problem(config: AuditConfig, problem: object, name: str | None = None) -> Report:
    return audit(
        problem,
        config.ranks,
        tolerance=config.tolerance,
        dtype=getattr(torch, config.dtype),
        seed=config.seed,
        diagnose=config.diagnose,
        timeout_s=config.timeout_s,
        name=name,
    )


def print_report(report: Report) -> None:
    """Print every comparison of one problem."""
    header, *lines = table(report)
    starts = [i for i, row in enumerate(report.rows) if i and row.counts != report.rows[i - 1].counts]
    print_table(
        f"audit of {report.problem}",
        header,
        lines,
        left=LEFT,
        styles=["green" if row.exact else "red" for row in report.rows],
        headings=dict.fromkeys(starts, ""),
    )
    for line in explanations(report):
        print_text(line)
    print_text("")
    print_text(f"{headline(report)} ({report.dtype}, {report.seconds:.1f} s)", "green" if report.exact else "bold red")


def print_summaries(summaries: Sequence[tuple[str, Summary]]) -> None:
    """Print a line for each setting of each library."""
    libraries = [library for library, _ in summaries]
    starts = [i for i, library in enumerate(libraries) if library not in libraries[:i]]
    print_table(
        "",
        SUMMARY_HEADER,
        [summary.cells for _, summary in summaries],
        left=SUMMARY_HEADER,
        styles=["green" if summary.exact else "red" for _, summary in summaries],
        headings={i: libraries[i] for i in starts},
    )
    print_text("W: number of ranks; 1/W: the gradient is too small by that factor")
