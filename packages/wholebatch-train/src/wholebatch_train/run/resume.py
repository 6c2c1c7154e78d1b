"""Resuming a run: the options that may change, and the command that the user can paste.

This module imports no torch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from wholebatch.app import UserError, option

from ..config import TrainConfig, differences, files_of_encoders
from .record import CONFIG, FREE, REPEATED, read_config


def check_same_run(saved: TrainConfig, asked: TrainConfig) -> None:
    """Raise UserError if `asked` differs from the `saved` configuration in anything that changes the numbers."""
    changed = [
        f"{name} was {old!r}, got {new!r}" for name, (old, new) in differences(saved, asked).items() if name not in FREE
    ]
    if changed:
        raise UserError(
            f"--resume continues with the configuration of the run: {'; '.join(changed)}. "
            "Leave these options out, or start a new run"
            + (f"; --until-step {asked.steps} makes more steps" if asked.steps > saved.steps else "")
        )


def how_to_resume(folder: Path | None, config: TrainConfig, otherwise: str = "") -> str:
    """Return the end of a message: how to resume the run in the folder; `otherwise` if it holds no run."""
    if folder is None or not (folder / CONFIG).exists():
        return otherwise
    return f"; resume with: {resume_command(folder, config)}"


def resume_command(folder: Path, config: TrainConfig) -> str:
    """Return the command that resumes the run in `folder` from any directory, by the program that runs now.

    It repeats the options by which this run, if it was itself resumed, differs from its saved configuration.
    """
    command = f"train --resume {shlex.quote(str(folder.absolute()))}{' --trust' * bool(files_of_encoders(config))}"
    python = shlex.quote(sys.executable)
    if {"SLURM_PROCID", "WORLD_SIZE"} <= os.environ.keys() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"srun as before, with {python} -m wholebatch {command}{_options_again(config, but='ranks')}"
    if {"TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        size = os.environ["LOCAL_WORLD_SIZE"]
        command += _options_again(config, but="ranks")
        if os.environ["WORLD_SIZE"] != size:
            return f"torchrun as before on each machine, with -m wholebatch {command}"
        return f"{python} -m torch.distributed.run --standalone --nproc-per-node {size} -m wholebatch {command}"
    return command_line(command + _options_again(config))


def command_line(arguments: str) -> str:
    """Return a command of the program that runs now, which a shell finds as it is printed."""
    python, program = shlex.quote(sys.executable), Path(sys.argv[0])
    if program.parts[-2:] == ("wholebatch", "__main__.py"):
        return f"{python} -m wholebatch {arguments}"
    if program.name == "wholebatch" and not _is_found(program):
        return f"{shlex.quote(str(program.absolute()))} {arguments}"
    return f"wholebatch {arguments}"


def _options_again(config: TrainConfig, but: str = "") -> str:
    if config.resume is None:
        return ""
    try:
        changed = differences(read_config(config.resume), config)
    except UserError:  # the run fails for its own reason
        return ""
    return "".join(f" {_argument(name, changed[name][1])}" for name in REPEATED if name in changed and name != but)


def _argument(name: str, value: object) -> str:
    """Return an option with its value, as a shell takes it; an option that is on or off has none."""
    if isinstance(value, bool):
        return option(name if value else f"no-{name}")
    return f"{option(name)} {shlex.quote(str(value))}"


def _is_found(program: Path) -> bool:
    """Return whether a shell finds this program by its name: its environment is activated."""
    path = shutil.which(program.name)
    return path is not None and Path(path).resolve() == program.resolve()
