"""`wholebatch train`: options to configuration to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import matplotlib  # noqa: F401  the fonts and the pictures need it: say so before the run, not after
import tyro

from .._user_error import UserError
from .config import DEFAULTS, TrainConfig, check_same_run
from .launch import launcher_size, run
from .run_folder import read_config
from .signals import Stopped, end_by, say


def main(argv: Sequence[str], *, prog: str) -> None:
    """Parse `argv` and train. A signal that stops the run is also what ends this process.

    Raises:
        UserError: for a mistake of the user's.
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    config = parse(argv, prog)
    if config.resume is None:
        config = parse(argv, prog, default=DEFAULTS[config.task])
    else:
        # Once more, on top of the saved configuration: whatever still differs was asked for on the command line.
        if config.run_folder is not None:
            raise UserError("--resume writes into the folder of the run; leave --run-folder out")
        saved = dataclasses.replace(read_config(config.resume), run_folder=None)
        if launcher_size() is not None:
            saved = dataclasses.replace(saved, processes=1)  # the launcher decides
        config = parse(argv, prog, default=saved)
        check_same_run(saved, config)
        config = dataclasses.replace(config, run_folder=config.resume)
    try:
        run(config)
    except Stopped as stopped:
        if stopped.message:
            say(stopped.message)
        end_by(stopped.signum)


def _with_absolute_data(config: TrainConfig) -> TrainConfig:
    """So that a run can be resumed from another working directory."""
    return config if config.data == "glyphs" else dataclasses.replace(config, data=str(Path(config.data).absolute()))


def parse(argv: Sequence[str], prog: str, default: TrainConfig | None = None) -> TrainConfig:
    """The configuration that `argv` asks for, on top of `default`."""
    return _with_absolute_data(tyro.cli(TrainConfig, args=list(argv), prog=prog, default=default or TrainConfig()))
