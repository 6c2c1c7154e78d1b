"""starts.json of a run folder: when the run was started and resumed, on what, and what plan and audit said.

The file informs the report. Nothing of it enters the numbers.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

import wholebatch as wb

from ..._base.bounded_json import Types, check_fields, parse_json
from ..._base.files import read_bounded, replacing
from ..._base.machine import processor_name
from ..._base.user_error import UserError

FILE = "starts.json"
_MOST_BYTES = 2**24
_TIMEOUT_S = 10
_NONE = type(None)


@dataclass(frozen=True)
class Start:
    """A start or a resumption of a run."""

    at: str
    """Date and time, UTC."""
    step: int
    """Steps made before."""
    ranks: int
    device: str
    versions: str
    """Of this package, Python and torch."""
    commit: str | None
    """Of this package, if it is used from a checkout."""
    plan: str
    audit: str | None
    """None: there was no audit, which a resumed run does not repeat."""


_TYPES: Types = {
    "at": str, "step": int, "ranks": int, "device": str, "versions": str, "commit": (str, _NONE), "plan": str,
    "audit": (str, _NONE),
}  # fmt: skip


def new_start(*, step: int, ranks: int, device: torch.device, plan: str, audit: str | None) -> Start:
    """Return the facts of a start at this moment."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    versions = f"wholebatch {wb.__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    return Start(now, step, ranks, name, versions, _commit(), plan, audit)


def read_starts(folder: Path) -> list[Start]:
    """Return the starts of the run in the folder, none if there is no file.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / FILE
    if not file.exists() and not file.is_symlink():
        return []
    try:
        values = parse_json(read_bounded(file, _MOST_BYTES), str(file))
        if not isinstance(values, list):
            raise ValueError(f"{file} must hold a list, got {type(values).__name__}")
        return [Start(**check_fields(value, str(file), _TYPES)) for value in values]
    except (OSError, ValueError) as error:
        raise UserError(f"{error}; remove {FILE}, which only informs the report") from error


def write_starts(folder: Path, starts: list[Start]) -> None:
    """Replace the file.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(folder / FILE) as file:
        file.write(json.dumps([dataclasses.asdict(start) for start in starts], indent=1).encode() + b"\n")


def _commit() -> str | None:
    """Return the commit of this package's checkout, with + for local changes; None without a checkout or git."""
    here = Path(__file__).parent
    found = []
    tracked = ["ls-files", "--error-unmatch", __file__]  # or the package is installed below another checkout
    for command in (tracked, ["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", str(here.parent)]):
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *command], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):  # no git, which is no error of the run
            return None
        if done.returncode:
            return None
        found.append(done.stdout.strip())
    return found[1] + ("+" if found[2] else "")
