"""The command `wholebatch audit`: options, and an exit code for continuous integration."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from .._processes import preload
from .._user_error import UserError
from ..comm.select import launched_processes
from . import presets
from .audit import audit
from .display import print_report, print_summaries
from .report import Report
from .summary import markdown, summarize


@dataclass(frozen=True)
class AuditConfig:
    """Compare the final gradient of several ranks with that of one process on the whole batch, and find the causes.

    Starts its own processes, on the CPU. Exit code 0: all gradients are right; 1: one is wrong; 2: a mistake in the
    options or in the problem.
    """

    problem: Annotated[str | None, tyro.conf.Positional] = None
    """MODULE:FUNCTION, where the function returns wholebatch.Problem(model, batch, loss)."""
    preset: tuple[str, ...] = ()
    """Instead of a problem: every setting of recipes and libraries. recipes, open_clip, sentence_transformers, lightly,
    pml, wholebatch; or all, which leaves out libraries that are not installed."""
    setting: str | None = None
    """With presets, only settings whose name contains this text; their reports are printed in full."""
    ranks: tuple[int, ...] = (1, 2, 3)
    """Numbers of ranks."""
    dtype: Literal["float64", "float32"] = "float64"
    """Precision of the computation."""
    tolerance: float | None = None
    """Largest relative error; by default 1e-5 in float64, 1e-3 in float32."""
    seed: int = 0
    """Seed of all random generators."""
    timeout_s: float = 120.0
    """Seconds for each group of processes."""
    diagnose: bool = True
    """Whether to look for causes."""
    json: bool = False
    """Print JSON instead of tables."""
    markdown: bool = False
    """With presets, print a table in Markdown."""


def main(argv: Sequence[str], *, prog: str) -> int:
    """Audit the problem or presets that `argv` names; return 1 if a gradient is wrong.

    Raises:
        UserError: for a mistake in the options or in the problem.
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    config = tyro.cli(AuditConfig, args=list(argv), prog=prog)
    if (config.problem is None) == (not config.preset):
        raise UserError("name a problem, as MODULE:FUNCTION, or presets, as in --preset open_clip; one of the two")
    if config.markdown and config.problem is not None:
        raise UserError("--markdown needs --preset: it prints a table of settings")
    if config.setting is not None and config.problem is not None:
        raise UserError("--setting needs --preset: it selects some of its settings")
    try:
        several = launched_processes("WORLD_SIZE") > 1
    except ValueError as error:
        raise UserError(str(error)) from error
    if several:
        raise UserError("the audit starts its own processes: run it without torchrun")
    sys.path.insert(0, os.getcwd())
    reports = [("", _audited(config, config.problem))] if config.problem else _of_presets(config)
    if config.json:
        found = [{"library": library, **report.to_dict()} for library, report in reports]
        print(json.dumps(found[0] if config.problem else found, indent=1))
    elif config.markdown:
        print(markdown([(library, summarize(report)) for library, report in reports]))
    elif config.problem is not None or config.setting is not None:
        for _, report in reports:
            print_report(report)
    else:
        print_summaries([(library, summarize(report)) for library, report in reports])
    return 0 if all(report.exact for _, report in reports) else 1


def _of_presets(config: AuditConfig) -> list[tuple[str, Report]]:
    names = presets.installed() if config.preset == ("all",) else list(config.preset)
    found = [(name, setting, problem) for name in names for setting, problem in presets.settings(name).items()]
    if config.setting is not None:
        found = [(name, setting, problem) for name, setting, problem in found if config.setting in setting]
        if not found:
            raise UserError(f"no setting of {', '.join(names)} has {config.setting!r} in its name")
    preload(*(presets.module_name(name) for name in names))
    reports = []
    for name, setting, problem in found:
        versions = " ".join(f"{package} {of}" for package, of in presets.versions(name).items())
        if not config.json and not config.markdown:
            print(f"{name}: {setting}", file=sys.stderr)
        reports.append((versions or name, _audited(config, problem, setting)))
    return reports


def _audited(config: AuditConfig, problem: object, name: str | None = None) -> Report:
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
