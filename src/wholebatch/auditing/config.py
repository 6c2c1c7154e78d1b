"""The options of `wholebatch audit`. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from .._base.user_error import UserError, option
from .._launch.launcher import launched_processes
from . import presets
from .arguments import check_arguments, split_name


@dataclass(frozen=True)
class AuditConfig:
    """Compare the final gradient of several ranks with that of one process on the whole batch, and find the causes.

    Starts its own processes, on the CPU. Exit code 0: all gradients are right; 1: one is wrong; 2: a mistake in the
    options or in the problem.
    """

    problem: Annotated[str | None, tyro.conf.Positional] = None
    """FILE.py:FUNCTION or MODULE:FUNCTION, where the function returns wholebatch.Problem(model, batch, loss)."""
    preset: tuple[str, ...] = ()
    """Instead of a problem: every setting of recipes and libraries. recipes, open_clip, sentence_transformers,
    transformers, ms_swift, lightly, pml, flag_embedding, lightning, wholebatch; or all, which leaves out libraries that
    are not installed."""
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
    """Seconds for each measurement on a group of processes."""
    diagnose: bool = True
    """Whether to look for causes."""
    json: bool = False
    """Print JSON instead of tables."""
    markdown: bool = False
    """With presets, print a table in Markdown."""

    def check(self) -> None:
        """Raise UserError for mistakes that can be found without torch."""
        if (self.problem is None) == (not self.preset):
            raise UserError("name a problem, as FILE.py:FUNCTION, or presets, as in --preset open_clip; one of the two")
        if self.markdown and self.problem is not None:
            raise UserError("--markdown needs --preset: it prints a table of settings")
        if self.setting is not None and self.problem is not None:
            raise UserError("--setting needs --preset: it selects some of its settings")
        if self.setting is not None and not self.setting.strip():
            raise UserError(f"--setting must be a part of a setting's name, got {self.setting!r}; leave it out for all")
        if self.json and self.markdown:
            raise UserError("--json and --markdown are two formats of the output: give one of the two")
        check_arguments(self.ranks, self.tolerance, self.timeout_s, self.seed, spelled=option)
        if self.problem is not None:
            split_name(self.problem)
        try:
            several = launched_processes("WORLD_SIZE") > 1
        except ValueError as error:
            raise UserError(str(error)) from error
        if several:
            raise UserError("the audit starts its own processes: run it without torchrun")
        if "all" in self.preset and len(self.preset) > 1:
            raise UserError(f"--preset all stands alone, got {' '.join(self.preset)}; leave the other names out")
        for name in self.preset:
            if name != "all":
                presets.check_installed(name)
