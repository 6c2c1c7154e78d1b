"""Resuming a run: its saved configuration, the options that may change, and the command that the user can paste.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from ..._base.bounded_json import unsealed
from ..._base.files import read_bounded
from ..._base.user_error import UserError, option
from ..config import TrainConfig, differences, files_of_encoders
from ..config_json import from_values

CONFIG = "config.json"
MOST_CONFIG_BYTES = 2**20
# May change when a run is resumed: they do not change the numbers. A later resume command repeats these.
_REPEATED = ("ranks", "device", "chunk_size", "workers", "fsdp", "patience", "keep_best", "tensorboard", "wandb")
_FREE = (*_REPEATED, "run_folder", "config", "resume", "trust", "until_step", "audit")


def read_config(path: Path) -> TrainConfig:
    """Return the configuration of the run in the folder `path`."""
    return from_values(_values(path), path / CONFIG)


def digest_of_config(path: Path) -> str:
    """Return the digest of the options that decide the numbers of the run in the folder `path`."""
    values = {name: value for name, value in _values(path).items() if name not in _FREE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _values(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        return unsealed(read_bounded(file, MOST_CONFIG_BYTES), "it")
    except FileNotFoundError as error:
        raise UserError(f"--resume {path}: that is no run folder, there is no {str(file)!r}") from error
    except OSError as error:
        raise UserError(f"--resume {path}: {str(file)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise UserError(f"{file} is not the configuration of a run of this version: {error}") from error


def check_same_run(saved: TrainConfig, asked: TrainConfig) -> None:
    """Raise UserError if `asked` differs from the `saved` configuration in anything that changes the numbers."""
    changed = [
        f"{name} was {old!r}, got {new!r}"
        for name, (old, new) in differences(saved, asked).items()
        if name not in _FREE
    ]
    if changed:
        raise UserError(
            f"--resume continues with the configuration of the run: {'; '.join(changed)}. "
            "Leave these options out, or start a new run"
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
        return f"srun as before, with {python} -m wholebatch {command}{_repeated(config, but='ranks')}"
    if {"TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        size = os.environ["LOCAL_WORLD_SIZE"]
        command += _repeated(config, but="ranks")
        if os.environ["WORLD_SIZE"] != size:
            return f"torchrun as before on each machine, with -m wholebatch {command}"
        return f"{python} -m torch.distributed.run --standalone --nproc-per-node {size} -m wholebatch {command}"
    return command_line(command + _repeated(config))


def command_line(arguments: str) -> str:
    """Return a command of the program that runs now, which a shell finds as it is printed."""
    python, program = shlex.quote(sys.executable), Path(sys.argv[0])
    if program.parts[-2:] == ("wholebatch", "__main__.py"):
        return f"{python} -m wholebatch {arguments}"
    if program.name == "wholebatch" and not _is_found(program):
        return f"{shlex.quote(str(program.absolute()))} {arguments}"
    return f"wholebatch {arguments}"


def _repeated(config: TrainConfig, but: str = "") -> str:
    if config.resume is None:
        return ""
    try:
        changed = differences(read_config(config.resume), config)
    except UserError:  # the run fails for its own reason
        return ""
    return "".join(f" {_given(name, changed[name][1])}" for name in _REPEATED if name in changed and name != but)


def _given(name: str, value: object) -> str:
    """Return an option with its value, as a shell takes it; an option that is on or off has none."""
    if isinstance(value, bool):
        return option(name if value else f"no-{name}")
    return f"{option(name)} {shlex.quote(str(value))}"


def _is_found(program: Path) -> bool:
    """Return whether a shell finds this program by its name: its environment is activated."""
    found = shutil.which(program.name)
    return found is not None and Path(found).resolve() == program.resolve()
