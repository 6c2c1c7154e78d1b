"""`wholebatch train`: from options to a configuration to a run. torch is imported after the options are checked."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import tyro

from wholebatch.app import UserError, launcher_size, needs, use_variables_of_slurm

from .config import DEFAULTS, TrainConfig, absolute, files_of_encoders
from .config_file import naming_file, with_file
from .data.paths import check_path
from .option_checks import check_options, check_present, number_of_ranks
from .run.lock import check_is_free
from .run.record import read_config
from .run.resume import check_same_run


def main(argv: Sequence[str], *, prog: str) -> None:
    """Parse `argv` and train. A signal that stops the run also ends this process.

    Raises:
        UserError: for a mistake of the user's.
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    if argv and not argv[0].startswith("-"):
        raise UserError(f"the data have an option: {prog} --data {shlex.join(argv)}")
    meeting = use_variables_of_slurm()
    config = _config(argv, prog)
    try:
        _check(config)
    except UserError as error:
        raise naming_file(error, config) from error
    if os.environ.get("RANK", "0").strip() == "0":
        print("loading torch and the data ...", flush=True)
        if meeting:
            print(meeting, flush=True)
    from .launch import run
    from .ranks.signals import Stopped, end_by, show

    try:
        run(config)
    except Stopped as stopped:
        if stopped.message:
            show(stopped.message)
        end_by(stopped.signum)


def _check(config: TrainConfig) -> None:
    """Refuse mistakes that can be found without torch. The ranks of a launcher check paths later, together."""
    check_options(config)
    number_of_ranks(config)
    if config.wandb is not None and find_spec("wandb") is None:
        raise UserError(needs("--wandb", "wandb"))
    if launcher_size() is not None:
        return
    if config.data != "glyphs":
        check_path(config.data)
    check_present("image", config.image_encoder)
    check_present("text", config.text_encoder)
    if config.resume is not None or config.run_folder is None:
        return
    if config.run_folder.is_file():
        raise UserError(f"--run-folder must be a folder, {str(config.run_folder)!r} is a file; choose another name")
    if config.run_folder.is_dir():
        with suppress(OSError):  # the run folder itself reports it
            check_is_free(config.run_folder)


def _config(argv: Sequence[str], prog: str) -> TrainConfig:
    """Return the configuration: the command line, on top of --config, on top of the defaults or of a resumed run."""
    asked = command_line = _parse(argv, prog, TrainConfig())
    file = command_line.config
    if file is not None:
        asked = _parse(argv, prog, with_file(TrainConfig(), file))
    if asked.resume is None:
        return _check_trust(command_line, _parse(argv, prog, with_file(DEFAULTS[asked.task], file)))
    if command_line.run_folder is not None:
        raise UserError("--resume writes into the folder of the run; leave --run-folder out")
    saved = dataclasses.replace(read_config(asked.resume), run_folder=None, config=None)
    if launcher_size() is not None:
        saved = dataclasses.replace(saved, ranks=1)  # the launcher decides
    config = _parse(argv, prog, with_file(saved, file))  # a difference was in the file or on the command line
    check_same_run(saved, config)
    return _check_trust(command_line, dataclasses.replace(config, run_folder=asked.resume))


def _check_trust(command_line: TrainConfig, config: TrainConfig) -> TrainConfig:
    """Return the configuration, unless it names a Python file that the command line alone does not."""
    unasked = [each for each in files_of_encoders(config) if each not in files_of_encoders(command_line)]
    if unasked and not command_line.trust:
        raise UserError(
            f"{config.resume or config.config} has {' and '.join(unasked)}, Python code that would be executed; read "
            "it, and pass --trust"
        )
    return config


def _parse(argv: Sequence[str], prog: str, default: TrainConfig) -> TrainConfig:
    """Parse `argv` on top of `default`; paths become absolute, so that any directory can resume the run."""
    config = tyro.cli(TrainConfig, args=list(argv), prog=prog, default=default)
    if config.config is not None:
        config = dataclasses.replace(config, config=config.config.absolute())
    return dataclasses.replace(
        config,
        data=config.data if config.data == "glyphs" else str(Path(config.data).absolute()),
        image_encoder=absolute(config.image_encoder, Path()),
        text_encoder=absolute(config.text_encoder, Path()),
    )
