"""`wholebatch train`: from options to a configuration to a run. torch is imported after the options are checked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import tyro

from .._launcher import launcher_size
from .._user_error import UserError
from .config import DEFAULTS, TrainConfig
from .data.paths import check_path
from .launcher import number_of_ranks
from .lock import check_is_free
from .resume import check_same_run, read_config


def main(argv: Sequence[str], *, prog: str) -> None:
    """Parse `argv` and train. A signal that stops the run also ends this process.

    Raises:
        UserError: for a mistake of the user's.
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    config = _config(argv, prog)
    _check(config)
    if os.environ.get("RANK", "0").strip() == "0":
        print("loading torch and the data ...", flush=True)
    from .launch import run
    from .signals import Stopped, end_by, show

    try:
        run(config)
    except Stopped as stopped:
        if stopped.message:
            show(stopped.message)
        end_by(stopped.signum)


def _check(config: TrainConfig) -> None:
    """Refuse mistakes that can be found without torch. The ranks of a launcher check paths later, together."""
    config.check()
    number_of_ranks(config)
    if launcher_size() is not None:
        return
    if config.data != "glyphs":
        check_path(config.data)
    if config.resume is not None or config.run_folder is None:
        return
    if config.run_folder.is_file():
        raise UserError(f"--run-folder must be a folder, {str(config.run_folder)!r} is a file; choose another name")
    if config.run_folder.is_dir():
        with suppress(OSError):  # the run folder itself reports it
            check_is_free(config.run_folder)


def _config(argv: Sequence[str], prog: str) -> TrainConfig:
    """Return the configuration of `argv`, on top of the task's defaults or of the resumed run's configuration."""
    config = _parse(argv, prog, TrainConfig())
    if config.resume is None:
        return _parse(argv, prog, DEFAULTS[config.task])
    if config.run_folder is not None:
        raise UserError("--resume writes into the folder of the run; leave --run-folder out")
    saved = dataclasses.replace(read_config(config.resume), run_folder=None)
    if launcher_size() is not None:
        saved = dataclasses.replace(saved, ranks=1)  # the launcher decides
    config = _parse(argv, prog, saved)  # a difference was on the command line
    check_same_run(saved, config)
    return dataclasses.replace(config, run_folder=config.resume)


def _parse(argv: Sequence[str], prog: str, default: TrainConfig) -> TrainConfig:
    """Parse `argv` on top of `default`; a path of data becomes absolute, so that any directory can resume the run."""
    config = tyro.cli(TrainConfig, args=list(argv), prog=prog, default=default)
    return config if config.data == "glyphs" else dataclasses.replace(config, data=str(Path(config.data).absolute()))
